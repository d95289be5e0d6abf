package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"
	"time"

	"cloche.dev/agent/internal/proc"
	"cloche.dev/agent/internal/testhost"
)

// begin starts a detached command and leaves it alone.
func (a *agent) begin(req fields) string {
	a.t.Helper()
	id := nextID()
	req["id"], req["detach"] = id, true
	ctx, cancel := context.WithCancel(context.Background())
	_, done := a.stream(ctx, req)
	cancel()
	done()
	return id
}

// send writes all of b, however often it takes.
func (a *agent) send(id string, b []byte, query string) proc.Written {
	a.t.Helper()
	var w proc.Written
	for {
		piece := b[:min(len(b), proc.MaxInput)]
		if status, e := a.call("POST", "/v1/exec/"+id+"/stdin"+query, piece, &w); e != nil {
			a.t.Fatalf("%d %v", status, e)
		}
		if b = b[w.Bytes:]; len(b) == 0 {
			return w
		}
	}
}

func (a *agent) seen(id string) string {
	a.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var info proc.Info
	a.call("GET", "/v1/exec/"+id, nil, &info)
	res, err := a.Open(ctx, "GET", "/v1/exec/"+id+"/output", nil)
	if err != nil {
		a.t.Fatal(err)
	}
	defer res.Body.Close()
	if !info.Running {
		r, err := testhost.Collect(res.Body)
		if err != nil {
			a.t.Fatal(err)
		}
		return string(r.Stdout)
	}
	var b bytes.Buffer
	for b.Len() < int(info.Offset) {
		p := make([]byte, 4096)
		n, err := res.Body.Read(p)
		b.Write(p[:n])
		if err != nil {
			break
		}
	}
	return b.String()
}

func (a *agent) shows(id, want string) {
	a.t.Helper()
	eventually(a.t, "it shows "+want, func() bool { return strings.Contains(a.seen(id), want) })
}

func (a *agent) end(id string) *testhost.Result {
	a.t.Helper()
	r, err := a.output(id, 0)
	if err != nil {
		a.t.Fatal(err)
	}
	return r
}

func TestInputIsWhole(t *testing.T) {
	a := start(t)
	id := a.begin(fields{"shell": "sleep 0.3; sha256sum", "stdin": "pipe"})
	data := bytes.Repeat([]byte("0123456789abcdef"), 5<<16)
	a.send(id, data, "")
	if w := a.send(id, []byte("z"), "?close=1"); !w.Closed {
		t.Errorf("got %+v", w)
	}
	sum := sha256.Sum256(append(data, 'z'))
	if r := a.end(id); string(r.Stdout) != hex.EncodeToString(sum[:])+"  -\n" {
		t.Errorf("got %q", r.Stdout)
	}
	if _, e := a.call("POST", "/v1/exec/"+id+"/stdin", []byte("x"), nil); e == nil || e.Status != 409 || e.Field != "exec_id" {
		t.Errorf("after the end: %+v", e)
	}
}

func TestInputThatNobodyReads(t *testing.T) {
	a := start(t)
	id := a.begin(fields{"shell": "sleep 60", "stdin": "pipe"})
	var w proc.Written
	a.call("POST", "/v1/exec/"+id+"/stdin?timeout_ms=100", bytes.Repeat([]byte("x"), 200<<10), &w)
	if w.Bytes != 64<<10 || w.Closed {
		t.Errorf("got %+v", w)
	}
	// A writer that hangs up does not keep others out.
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	_, _ = a.Do(ctx, "POST", "/v1/exec/"+id+"/stdin?timeout_ms=60000", []byte("y"), nil)
	cancel()
	a.call("POST", "/v1/exec/"+id+"/stdin?timeout_ms=50", []byte("z"), &w)
	if w.Bytes != 0 || w.Closed {
		t.Errorf("got %+v", w)
	}
	a.call("DELETE", "/v1/exec/"+id, nil, &[]byte{})
	// One that closes its end makes the next write fail.
	id = a.begin(fields{"shell": "exec <&-; sleep 60", "stdin": "pipe"})
	eventually(t, "the pipe is closed", func() bool {
		_, e := a.call("POST", "/v1/exec/"+id+"/stdin", []byte("x"), nil)
		return e != nil && e.Status == 409 && e.Field == "stdin"
	})
	if _, e := a.call("POST", "/v1/exec/"+id+"/stdin", bytes.Repeat([]byte("x"), 256<<10+1), nil); e == nil || e.Status != 413 {
		t.Errorf("got %+v", e)
	}
	a.call("DELETE", "/v1/exec/"+id, nil, &[]byte{})
}

func TestTerminal(t *testing.T) {
	both(t, func(t *testing.T, a *agent) {
		id := a.begin(fields{"pty": fields{"cols": 120, "rows": 40},
			"shell": "echo [$TERM]; stty size; tty; trap 'stty size' WINCH; echo ready; while :; do sleep 0.02; done"})
		a.shows(id, "[xterm-256color]\r\n40 120\r\n/dev/pts/")
		a.shows(id, "ready")
		if status, e := a.call("POST", "/v1/exec/"+id+"/resize", fields{"cols": 132, "rows": 50}, &[]byte{}); status != 204 {
			t.Fatalf("%+v", e)
		}
		a.shows(id, "50 132")
		for _, bad := range []fields{{"cols": 0, "rows": 1}, {"cols": 65535, "rows": 65535}, {"rows": 5}, {"cols": 1001, "rows": 5}} {
			if _, e := a.call("POST", "/v1/exec/"+id+"/resize", bad, nil); e == nil || e.Status != 400 {
				t.Errorf("%v: %+v", bad, e)
			}
		}
		var info proc.Info
		a.call("GET", "/v1/exec/"+id, nil, &info)
		if info.Stdin != "pty" || info.PTY == nil || *info.PTY != (proc.Size{Cols: 132, Rows: 50}) {
			t.Errorf("got %+v", info)
		}
		a.call("POST", "/v1/exec/"+id+"/signal", fields{"signal": "KILL", "target": "tree"}, &[]byte{})
		a.end(id)
		// A shell that waits for a short child would not always end of it.
		id = a.begin(fields{"pty": fields{"cols": 80, "rows": 24}, "shell": "echo up; exec sleep 100"})
		a.shows(id, "up")
		a.send(id, []byte("\x03"), "")
		if r := a.end(id); r.Exit.ExitCode != 130 {
			t.Errorf("Ctrl-C: %+v", r.Exit)
		}
		if _, e := a.call("POST", "/v1/exec/"+id+"/resize", fields{"cols": 1, "rows": 1}, nil); e == nil || e.Status != 409 {
			t.Errorf("after the end: %+v", e)
		}
	})
}

func TestLoginShellInATerminal(t *testing.T) {
	a := start(t)
	id := a.begin(fields{"pty": fields{"cols": 80, "rows": 24}, "env": fields{"PS1": "$ ", "TERM": "dumb"}})
	a.send(id, []byte("echo \"<$0 $TERM>\"\nsh -c 'echo go-$((40+1)); exec sleep 100'\n"), "")
	a.shows(id, "go-41")
	if got := a.seen(id); !strings.Contains(got, "<-") {
		t.Errorf("it is no login shell: %q", got)
	}
	a.send(id, []byte("\x1a"), "") // Ctrl-Z, and back into the shell
	a.shows(id, "Stopped")         // and so it has to be told twice to end
	a.send(id, []byte("kill -9 %1; echo still-$((40+2)); exit 7\nexit 7\n"), "")
	if r := a.end(id); r.Exit.ExitCode != 7 || !strings.Contains(string(r.Stdout), "still-42") {
		t.Errorf("%q %+v", r.Stdout, r.Exit)
	}
	// All that was written before the end is there, and who stays behind holds up nothing.
	for range 20 {
		id = a.begin(fields{"pty": fields{"cols": 80, "rows": 24}, "shell": "setsid sleep 5 & seq 1 2000; echo end"})
		if r := a.end(id); !strings.HasSuffix(string(r.Stdout), "2000\r\nend\r\n") {
			t.Fatalf("the end is missing: %q", r.Stdout[max(0, len(r.Stdout)-40):])
		}
	}
}

func TestSignalTargets(t *testing.T) {
	both(t, func(t *testing.T, a *agent) {
		dir := t.TempDir()
		script := "trap 'echo leader' USR1; sh -c 'trap \"echo child; exit\" USR1; while :; do sleep 0.02; done' & " +
			"setsid sh -c 'trap \"echo away; exit\" USR1; echo up; while :; do sleep 0.02; done' & while :; do sleep 0.02; done"
		for target, want := range map[string][]string{
			"process": {"leader"}, "group": {"leader", "child"}, "tree": {"leader", "child", "away"},
		} {
			id := a.begin(fields{"shell": script, "cwd": dir})
			a.shows(id, "up")
			time.Sleep(100 * time.Millisecond) // the other one has its trap as well
			if status, e := a.call("POST", "/v1/exec/"+id+"/signal", fields{"signal": "usr1", "target": target}, nil); e == nil {
				t.Errorf("lower case was accepted: %d", status)
			}
			if _, e := a.call("POST", "/v1/exec/"+id+"/signal", fields{"signal": "USR1", "target": target}, &[]byte{}); e != nil {
				t.Fatalf("%s: %+v", target, e)
			}
			for _, w := range want {
				a.shows(id, w)
			}
			for _, w := range []string{"leader", "child", "away"} {
				if got := a.seen(id); strings.Contains(got, w) && !strings.Contains(strings.Join(want, " "), w) {
					t.Errorf("%s reached %s", target, w)
				}
			}
			if _, e := a.call("POST", "/v1/exec/"+id+"/signal", fields{"signal": 9, "target": "tree"}, &[]byte{}); e != nil {
				t.Fatal(e)
			}
			if r := a.end(id); r.Exit.Reason != "signaled" || r.Exit.Signal != "SIGKILL" {
				t.Errorf("%+v", r.Exit)
			}
			if _, e := a.call("POST", "/v1/exec/"+id+"/signal", fields{"signal": 15}, nil); e == nil || e.Status != 409 {
				t.Errorf("after the end: %+v", e)
			}
		}
		if n := alive(dir); n != 0 {
			t.Errorf("%d are left", n)
		}
	})
}

func TestLimits(t *testing.T) {
	a := start(t)
	r := a.run(fields{"shell": "ulimit -n; ulimit -Hn; ulimit -s; ulimit -t", "rlimits": fields{"nofile": 100, "stack": 4 << 20, "cpu": 7}})
	if string(r.Stdout) != "100\n100\n4096\n7\n" {
		t.Errorf("got %q %q", r.Stdout, r.Stderr)
	}
	if r := a.run(fields{"argv": []string{"nothing-of-this-name"}, "rlimits": fields{"nofile": 10}}); r.Exit.ExitCode != 127 {
		t.Errorf("%+v", r.Exit)
	}
	for _, bad := range []fields{{"nofile": -1}, {"pids": 3}, {"cpu": -2}} {
		if _, err := a.try(fields{"shell": "true", "rlimits": bad}); err == nil {
			t.Errorf("%v was accepted", bad)
		}
	}
}

func TestStreamsHaveOffsetsOfTheirOwn(t *testing.T) {
	a := start(t)
	id := a.begin(fields{"shell": "for i in 1 2 3; do printf out$i; sleep 0.05; printf e$i >&2; sleep 0.05; done", "tag": "mine"})
	a.end(id)
	read := func(query string) *testhost.Result {
		res, err := a.Open(context.Background(), "GET", "/v1/exec/"+id+"/output?"+query, nil)
		if err != nil {
			t.Fatal(query, err)
		}
		defer res.Body.Close()
		r, err := testhost.Collect(res.Body)
		if err != nil {
			t.Fatal(query, err)
		}
		return r
	}
	if r := read("stream=stdout&from=2"); string(r.Stdout) != "t1out2out3" || len(r.Stderr) != 0 {
		t.Errorf("%q %q", r.Stdout, r.Stderr)
	}
	if r := read("stream=stderr&from=3"); string(r.Stderr) != "2e3" || len(r.Stdout) != 0 {
		t.Errorf("%q %q", r.Stdout, r.Stderr)
	}
	if r := read("stream=stderr&from=6"); len(r.Stderr) != 0 || r.Exit == nil {
		t.Errorf("%q", r.Stderr)
	}
	r := read("from=7")
	if r.Started.StdoutAt == nil || *r.Started.StdoutAt != 5 || *r.Started.StderrAt != 2 {
		t.Errorf("%+v", r.Started)
	}
	if _, e := a.call("GET", "/v1/exec/"+id+"/output?stream=stderr&from=7", nil, nil); e == nil || e.Status != 400 {
		t.Errorf("%+v", e)
	}
	var info proc.Info
	a.call("GET", "/v1/exec/"+id, nil, &info)
	if info.Stdout != 12 || info.Stderr != 6 || info.First != 0 || info.Tag != "mine" {
		t.Errorf("%+v", info)
	}
	// What a small record has lost is told apart.
	id = a.begin(fields{"shell": "head -c 9000 /dev/zero >&2; head -c 20000 /dev/zero", "record_bytes": 8192})
	r = a.end(id)
	lost := int64(0)
	for _, g := range r.Gaps {
		if g.StderrAt == nil || g.StdoutAt == nil {
			t.Fatalf("%+v", g)
		}
		lost += g.Bytes
	}
	if lost+int64(len(r.Stdout)+len(r.Stderr)) != 29000 {
		t.Errorf("%d lost, %d and %d seen", lost, len(r.Stdout), len(r.Stderr))
	}
	// Which of the streams is read first is for the scheduler. Whoever comes later has one gap, and then the rest of both.
	r = read("from=0")
	if len(r.Gaps) != 1 {
		t.Fatalf("%+v", r.Gaps)
	}
	gap := r.Gaps[0]
	if *gap.StderrAt+uint64(len(r.Stderr)) != 9000 || *gap.StdoutAt+uint64(len(r.Stdout)) != 20000 {
		t.Errorf("%d %d %d %d", *gap.StdoutAt, len(r.Stdout), *gap.StderrAt, len(r.Stderr))
	}
}

func TestForgetAndWait(t *testing.T) {
	a := start(t)
	id := a.begin(fields{"shell": "echo x; sleep 60"})
	var info proc.Info
	a.call("GET", "/v1/exec/"+id+"/wait?timeout_ms=50", nil, &info)
	if !info.Running {
		t.Errorf("%+v", info)
	}
	if status, e := a.call("DELETE", "/v1/exec/"+id+"?forget=1", nil, &[]byte{}); status != 204 {
		t.Fatal(e)
	}
	for _, path := range []string{"", "/wait", "/output"} {
		if _, e := a.call("GET", "/v1/exec/"+id+path, nil, nil); e == nil || e.Status != 404 {
			t.Errorf("%s: %+v", path, e)
		}
	}
	id = a.begin(fields{"shell": "sleep 0.1; exit 3"})
	a.call("GET", "/v1/exec/"+id+"/wait?timeout_ms=20000", nil, &info)
	if info.Running || info.Exit.ExitCode != 3 {
		t.Errorf("%+v", info)
	}
	a.call("DELETE", "/v1/exec/"+id+"?forget=1", nil, &[]byte{})
	if _, e := a.call("GET", "/v1/exec/"+id, nil, nil); e == nil || e.Status != 404 {
		t.Errorf("%+v", e)
	}
	if _, e := a.call("DELETE", "/v1/exec/"+id+"?forget=1", nil, nil); e == nil || e.Status != 404 {
		t.Errorf("%+v", e)
	}
}

func TestNobodyListens(t *testing.T) {
	a := start(t)
	marker := fmt.Sprintf("31.%d", time.Now().UnixNano()%100000)
	id := a.begin(fields{"pty": fields{"cols": 80, "rows": 24}, "shell": "sleep " + marker + " & wait", "linger_ms": 300})
	ctx, cancel := context.WithCancel(context.Background())
	res, err := a.Open(ctx, "GET", "/v1/exec/"+id+"/output", nil)
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(600 * time.Millisecond)
	if alive(marker) == 0 {
		t.Error("it has ended although somebody listens")
	}
	cancel()
	res.Body.Close()
	eventually(t, "it ends when nobody does", func() bool { return alive(marker) == 0 })
	eventually(t, "it is known to have ended", func() bool {
		var info proc.Info
		a.call("GET", "/v1/exec/"+id, nil, &info)
		return !info.Running
	})
}

func TestProcessTable(t *testing.T) {
	both(t, func(t *testing.T, a *agent) {
		id := a.begin(fields{"argv": []string{"bash", "-c", "exec -a $'b\\xffd name' sleep 60"}, "user": "nobody"})
		defer a.call("DELETE", "/v1/exec/"+id, nil, &[]byte{})
		var info proc.Info
		a.call("GET", "/v1/exec/"+id, nil, &info)
		var list struct{ Processes []proc.Process }
		var found *proc.Process
		eventually(t, "the process is in the list", func() bool {
			a.call("GET", "/v1/processes", nil, &list)
			for i := range list.Processes {
				if p := &list.Processes[i]; p.PID == info.PID && strings.Contains(p.Command, "name") {
					found = p
				}
			}
			return found != nil
		})
		if found.User != "nobody" || found.Command != "b\uFFFDd name 60" || found.Name != "sleep" || found.PPID == 0 || found.RSSKB == 0 {
			t.Errorf("%+v", found)
		}
		if age := time.Since(time.Unix(0, found.StartedNS)); age < -time.Second || age > time.Minute {
			t.Errorf("started %v ago", age)
		}
		if found.ExecID != "" && found.ExecID != id {
			t.Errorf("%+v", found)
		}
	})
}

func TestBadDetachedRequests(t *testing.T) {
	a := start(t)
	size := fields{"cols": 80, "rows": 24}
	for field, req := range map[string]fields{
		"on_lost":      {"shell": "true", "detach": true, "on_lost": "hangup"},
		"cols":         {"shell": "true", "detach": true, "pty": fields{"cols": 0, "rows": 1}},
		"rows":         {"shell": "true", "detach": true, "pty": fields{"cols": 1, "rows": 1001}},
		"stdin":        {"shell": "true", "detach": true, "pty": size, "stdin": "pipe"},
		"record_bytes": {"shell": "true", "detach": true, "record_bytes": 1},
		"linger_ms":    {"shell": "true", "detach": true, "linger_ms": -1},
		"tag":          {"shell": "true", "detach": true, "tag": strings.Repeat("x", 2049)},
	} {
		req["id"] = nextID()
		if _, e := a.call("POST", "/v1/exec", req, nil); e == nil || e.Status != 400 || e.Field != field {
			t.Errorf("%s: %+v", field, e)
		}
	}
}
