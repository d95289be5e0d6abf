package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"testing"

	"cloche.dev/agent/internal/proc"
)

// feed opens the input of a command as one long call.
func (a *agent) feed(id string) (io.WriteCloser, func() (proc.Written, error), context.CancelFunc) {
	a.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	r, w := io.Pipe()
	res, err := a.Open(ctx, "POST", "/v1/exec/"+id+"/feed", r)
	if err != nil {
		cancel()
		a.t.Fatal(err)
	}
	a.t.Cleanup(func() { cancel(); _ = res.Body.Close(); _ = w.Close() })
	return w, func() (told proc.Written, err error) {
		return told, json.NewDecoder(res.Body).Decode(&told)
	}, cancel
}

func TestAFeedIsWhole(t *testing.T) {
	a := start(t)
	id := a.begin(fields{"shell": "sleep 0.2; sha256sum", "stdin": "pipe"})
	w, told, _ := a.feed(id)
	data := bytes.Repeat([]byte("0123456789abcdef"), 5<<16)
	for at := 0; at < len(data); at += 77777 {
		if _, err := w.Write(data[at:min(at+77777, len(data))]); err != nil {
			t.Fatal(err)
		}
	}
	_ = w.Close()
	if got, err := told(); err != nil || got != (proc.Written{Bytes: len(data), Closed: true}) {
		t.Errorf("got %+v: %v", got, err)
	}
	sum := sha256.Sum256(data)
	if r := a.end(id); string(r.Stdout) != hex.EncodeToString(sum[:])+"  -\n" {
		t.Errorf("got %q", r.Stdout)
	}
}

func TestAFeedThatNobodyTakes(t *testing.T) {
	a := start(t)
	// The command reads a little and closes its end: the call ends by itself.
	id := a.begin(fields{"shell": "head -c 3; exec <&-; sleep 60", "stdin": "pipe"})
	w, told, _ := a.feed(id)
	go func() {
		for {
			if _, err := w.Write(bytes.Repeat([]byte("x"), 100_000)); err != nil {
				return
			}
		}
	}()
	if got, err := told(); err != nil || !got.Closed {
		t.Errorf("got %+v: %v", got, err)
	}
	if _, e := a.call("POST", "/v1/exec/"+id+"/feed", []byte("x"), nil); e == nil || e.Status != 409 || e.Field != "stdin" {
		t.Errorf("got %+v", e)
	}
	a.call("DELETE", "/v1/exec/"+id, nil, &[]byte{})

	// One whose host breaks off gives its turn away; what it had sent stays.
	id = a.begin(fields{"shell": "cat", "stdin": "pipe"})
	w, _, cancel := a.feed(id)
	if _, err := w.Write([]byte("one")); err != nil {
		t.Fatal(err)
	}
	a.shows(id, "one")
	cancel()
	a.send(id, []byte("two"), "?close=1")
	if r := a.end(id); string(r.Stdout) != "onetwo" {
		t.Errorf("got %q", r.Stdout)
	}

	for _, wrong := range []string{"nobody", id} {
		if _, e := a.call("POST", "/v1/exec/"+wrong+"/feed", []byte("x"), nil); e == nil || (e.Status != 404 && e.Field != "exec_id") {
			t.Errorf("%s: %+v", wrong, e)
		}
	}
}

func TestAFeedOfATerminal(t *testing.T) {
	a := start(t)
	id := a.begin(fields{"shell": "read a; echo got $a; read b; echo end $b", "pty": fields{"cols": 80, "rows": 24}})
	w, told, _ := a.feed(id)
	_, _ = w.Write([]byte("x\n"))
	a.shows(id, "got x")
	_ = w.Close()
	if got, err := told(); err != nil || got != (proc.Written{Bytes: 2}) {
		t.Errorf("got %+v: %v", got, err)
	}
	// The end of the call is none of the terminal.
	a.send(id, []byte("y\n"), "")
	a.shows(id, "end y")
	eventually(t, "it has ended", func() bool {
		var info proc.Info
		a.call("GET", "/v1/exec/"+id, nil, &info)
		return !info.Running
	})
}
