package e2e

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	"cloche.dev/agent/internal/proc"
	"cloche.dev/agent/internal/testhost"
)

func (a *agent) output(id string, from uint64) (*testhost.Result, error) {
	res, err := a.Open(context.Background(), "GET", fmt.Sprintf("/v1/exec/%s/output?from=%d", id, from), nil)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	return testhost.Collect(res.Body)
}

func TestDetachedOutlivesItsStream(t *testing.T) {
	a := start(t)
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(context.Background())
	id := nextID()
	_, done := a.stream(ctx, fields{"id": id, "detach": true,
		"shell": "echo one; while [ ! -e " + dir + "/go ]; do sleep 0.01; done; echo two; echo err >&2; exit 6"})
	cancel()
	done()
	a.Client.Close()
	a.Client = a.connect()
	var info proc.Info
	eventually(t, "the first line is recorded", func() bool {
		a.call("GET", "/v1/exec/"+id, nil, &info)
		return info.Offset == 4
	})
	if !info.Running || !info.Detach || info.PID == 0 {
		t.Fatalf("got %+v", info)
	}
	results := make(chan *testhost.Result, 2)
	for _, from := range []uint64{0, 2} {
		go func() {
			r, err := a.output(id, from)
			if err != nil {
				t.Error(err)
				r = &testhost.Result{}
			}
			results <- r
		}()
	}
	if err := os.WriteFile(dir+"/go", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		r := <-results
		if !strings.HasSuffix("one\ntwo\n", string(r.Stdout)) || string(r.Stderr) != "err\n" || r.Exit.ExitCode != 6 {
			t.Errorf("%q %q %+v", r.Stdout, r.Stderr, r.Exit)
		}
	}
	a.call("GET", "/v1/exec/"+id, nil, &info)
	if info.Running || info.Exit == nil || info.Exit.ExitCode != 6 || info.Offset != 12 {
		t.Errorf("got %+v", info)
	}
	if r, err := a.output(id, 0); err != nil || string(r.Stdout) != "one\ntwo\n" {
		t.Errorf("after the end: %v", err)
	}
	if _, err := a.output(id, 13); err == nil {
		t.Error("an offset beyond the end was accepted")
	}
}

// TestFastDetached reads the output the moment the command is said to have
// ended.
func TestFastDetached(t *testing.T) {
	a := start(t)
	for range 50 {
		id := nextID()
		_, done := a.stream(context.Background(), fields{"id": id, "detach": true, "shell": "printf x; exit 5"})
		var info proc.Info
		eventually(t, "it has ended", func() bool {
			a.call("GET", "/v1/exec/"+id, nil, &info)
			return !info.Running
		})
		if r, err := a.output(id, 0); err != nil || string(r.Stdout) != "x" || r.Exit.ExitCode != 5 {
			t.Fatalf("%+v %v", r, err)
		}
		done()
	}
}

func TestIDs(t *testing.T) {
	a := start(t)
	a.run(fields{"id": "same", "argv": []string{"true"}})
	_, e := a.call("POST", "/v1/exec", fields{"id": "same", "argv": []string{"true"}}, nil)
	if e == nil || e.Status != 409 || e.Code != "conflict" {
		t.Errorf("got %+v", e)
	}
	// A start that was refused leaves the id free.
	a.call("POST", "/v1/exec", fields{"id": "free", "argv": []string{"true"}, "cwd": "/none"}, nil)
	a.run(fields{"id": "free", "argv": []string{"true"}})
	for _, path := range []string{"/v1/exec/unknown", "/v1/exec/unknown/output"} {
		if _, e := a.call("GET", path, nil, nil); e == nil || e.Status != 404 || e.Field != "exec_id" {
			t.Errorf("%s: %+v", path, e)
		}
	}
	if _, e := a.call("DELETE", "/v1/exec/unknown", nil, nil); e == nil || e.Status != 404 {
		t.Errorf("got %+v", e)
	}
	if status, _ := a.call("DELETE", "/v1/exec/same", nil, &[]byte{}); status != 204 {
		t.Errorf("ended already: %d", status)
	}
}

func TestRecordsExpire(t *testing.T) {
	a := start(t)
	first := nextID()
	a.run(fields{"id": first, "detach": true, "shell": "echo x"})
	for range 512 {
		a.run(fields{"detach": true, "argv": []string{"true"}})
	}
	var list struct {
		Execs []proc.Info `json:"execs"`
	}
	a.call("GET", "/v1/exec", nil, &list)
	if len(list.Execs) != 512 {
		t.Errorf("%d records", len(list.Execs))
	}
	if _, e := a.call("GET", "/v1/exec/"+first, nil, nil); e == nil || e.Status != 404 {
		t.Errorf("got %+v", e)
	}
}

func TestDetachedKillAndTimeout(t *testing.T) {
	both(t, func(t *testing.T, a *agent) {
		res := a.run(fields{"detach": true, "shell": "echo a; sleep 60", "timeout_ms": 200})
		if res.Exit.Reason != "timeout" || string(res.Stdout) != "a\n" {
			t.Errorf("got %+v", res.Exit)
		}
		id := nextID()
		_, done := a.stream(context.Background(), fields{"id": id, "detach": true, "shell": "sleep 60 & wait"})
		defer done()
		a.call("DELETE", "/v1/exec/"+id, nil, &[]byte{})
		if r, err := a.output(id, 0); err != nil || r.Exit.Reason != "cancelled" {
			t.Errorf("%+v %v", r, err)
		}
	})
}
