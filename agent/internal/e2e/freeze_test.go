package e2e

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"cloche.dev/agent/internal/proc"
	"cloche.dev/agent/internal/testhost"
)

// stands says whether a freeze really stops this agent's commands.
func (a *agent) stands() bool {
	b, _ := os.ReadFile("/proc/self/mounts")
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 2 && f[2] == "cgroup2" {
			if _, err := os.Stat(fmt.Sprintf("%s/cloche-dev-%d", f[1], a.pid)); err == nil {
				return true
			}
		}
	}
	return false
}

func (a *agent) freeze(body fields) {
	a.t.Helper()
	var got struct {
		Steps map[string]float64 `json:"steps"`
	}
	_, e := a.call("POST", "/v1/freeze", body, &got)
	if _, ok := got.Steps["commands"]; e != nil || !ok || len(got.Steps) != 1 {
		a.t.Fatalf("%+v %+v", e, got)
	}
}

func (a *agent) thaw(keep bool) {
	a.t.Helper()
	if status, e := a.call("POST", "/v1/thaw", fields{"keep": keep}, nil); status != 200 {
		a.t.Fatalf("thaw: %d %+v", status, e)
	}
}

// lose ends the session, and begins another when the agent has seen it. On a
// port that is always so; here the two have sockets of their own.
func (a *agent) lose() {
	a.t.Helper()
	a.Client.Close()
	time.Sleep(100 * time.Millisecond)
	a.Client = a.connect()
}

func (a *agent) running(id string) bool {
	a.t.Helper()
	var list struct {
		Execs []proc.Info `json:"execs"`
	}
	a.call("GET", "/v1/exec", nil, &list)
	for _, i := range list.Execs {
		if i.ID == id {
			return i.Running
		}
	}
	return false
}

// writer starts a command that writes more than any buffer holds, over and
// over. Nobody reads it. It answers how often it has done so.
func (a *agent) writer(more fields) (id string, rounds func() int64) {
	a.t.Helper()
	path := a.t.TempDir() + "/rounds"
	id = nextID()
	req := fields{"id": id, "shell": "while :; do head -c 3000000 /dev/zero || exit; echo >> " + path + "; done"}
	for k, v := range more {
		req[k] = v
	}
	a.stream(context.Background(), req)
	return id, func() int64 {
		st, err := os.Stat(path)
		if err != nil {
			return 0
		}
		return st.Size()
	}
}

func TestFreezeStopsCommands(t *testing.T) {
	both(t, func(t *testing.T, a *agent) {
		path := t.TempDir() + "/ticks"
		ticks := func() int {
			b, _ := os.ReadFile(path)
			return len(b)
		}
		done := make(chan string, 1)
		go func() {
			res, err := a.try(fields{"shell": "echo a; while [ ! -e " + path + ".end ]; do printf . >> " + path + "; sleep 0.01; done; echo b"})
			if err != nil {
				t.Error(err)
			}
			done <- string(res.Stdout)
		}()
		eventually(t, "it ticks", func() bool { return ticks() > 2 })
		for range 3 {
			a.freeze(nil)
			before := ticks()
			time.Sleep(150 * time.Millisecond)
			if stopped := ticks() == before; stopped != a.stands() {
				t.Errorf("stopped: %v", stopped)
			}
			a.thaw(false)
			eventually(t, "it goes on", func() bool { return ticks() > before })
		}
		_ = os.WriteFile(path+".end", nil, 0o600)
		if out := <-done; out != "a\nb\n" {
			t.Errorf("got %q", out)
		}
	})
}

func TestSessionLostInAFreeze(t *testing.T) {
	both(t, func(t *testing.T, a *agent) {
		for _, verdict := range []string{"keep", "renew", "cancel", "auto"} {
			id, rounds := a.writer(nil)
			kept := verdict == "keep" || verdict == "renew"
			if verdict == "auto" {
				a.freeze(fields{"timeout_ms": 700})
			} else {
				a.freeze(fields{})
			}
			a.lose()
			if !a.running(id) {
				t.Fatalf("%s: it has been cancelled already", verdict)
			}
			switch verdict {
			case "keep":
				a.thaw(true)
			case "cancel":
				a.thaw(false)
			case "renew":
				var got struct {
					Steps map[string]float64 `json:"steps"`
				}
				a.call("POST", "/v1/renew", fields{"thaw": true}, &got)
				if _, ok := got.Steps["thaw"]; !ok || len(got.Steps) != 1 {
					t.Errorf("got %+v", got)
				}
			}
			if kept {
				before := rounds()
				eventually(t, "what it writes is read", func() bool { return rounds() > before+3 })
				if status, _ := a.call("DELETE", "/v1/exec/"+id, nil, &[]byte{}); status != 204 {
					t.Errorf("kill: %d", status)
				}
			}
			eventually(t, "it is gone after "+verdict, func() bool { return !a.running(id) })
			if status, _ := a.call("DELETE", "/v1/exec/"+id, nil, &[]byte{}); status != 204 {
				t.Errorf("it is not remembered: %d", status)
			}
		}
	})
}

func TestKeptCommands(t *testing.T) {
	both(t, func(t *testing.T, a *agent) {
		slow, _ := a.writer(fields{"timeout_ms": 1500})
		limited, _ := a.writer(fields{"max_output": 10_000_000, "kill_on_limit": true})
		_, rounds := a.writer(nil)
		path := t.TempDir() + "/end"
		short := nextID()
		a.stream(context.Background(), fields{"id": short, "shell": "sleep 0.5; yes | head -c 1000000; echo end > " + path})
		a.freeze(fields{})
		a.lose()
		a.thaw(true)
		eventually(t, "it comes to its own end", func() bool {
			b, _ := os.ReadFile(path)
			return string(b) == "end\n"
		})
		for _, id := range []string{short, limited, slow} {
			eventually(t, "it has ended", func() bool { return !a.running(id) })
		}
		// Once kept, it does not depend on later sessions and freezes.
		for range 2 {
			a.lose()
			a.freeze(fields{})
			a.lose()
			a.thaw(false)
			before := rounds()
			eventually(t, "it goes on", func() bool { return rounds() > before })
		}
	})
}

func TestFreezeTwice(t *testing.T) {
	a := start(t)
	a.thaw(false)
	a.freeze(fields{"disk": true})
	if _, e := a.call("POST", "/v1/freeze", nil, nil); e == nil || e.Status != 409 || e.Code != "conflict" {
		t.Errorf("got %+v", e)
	}
	a.thaw(true)
	a.thaw(true)
	a.freeze(fields{"timeout_ms": 60_000})
	a.thaw(false)
	for _, ms := range []any{99, 60_001, -1, "x"} {
		if _, e := a.call("POST", "/v1/freeze", fields{"timeout_ms": ms}, nil); e == nil || e.Status != 400 || e.Field != "timeout_ms" {
			t.Errorf("%v: %+v", ms, e)
		}
	}
	// A limit that has passed is none for the next freeze.
	a.freeze(fields{"timeout_ms": 100})
	a.thaw(false)
	a.freeze(fields{})
	time.Sleep(200 * time.Millisecond)
	if _, e := a.call("POST", "/v1/freeze", nil, nil); e == nil || e.Status != 409 {
		t.Errorf("thawed by the limit of another: %+v", e)
	}
	a.thaw(false)
}

func TestStartInAFreeze(t *testing.T) {
	both(t, func(t *testing.T, a *agent) {
		for _, how := range []fields{{}, {"detach": true}} {
			dir := t.TempDir()
			mine := nextID()
			other := a.connect()
			a.freeze(fields{"timeout_ms": 400 + 600*len(how)})
			// Its session is lost before the thaw: it must never run.
			go ghost(other, fields{"id": nextID(), "detach": how["detach"] != nil, "shell": "touch " + dir + "/ghost"})
			done := make(chan struct{})
			go func() {
				defer close(done)
				req := fields{"id": mine, "timeout_ms": 60_000, "shell": "touch " + dir + "/ran; echo hi"}
				for k, v := range how {
					req[k] = v
				}
				if res, err := a.try(req); err != nil || string(res.Stdout) != "hi\n" {
					t.Errorf("%+v %v", res, err)
				}
			}()
			time.Sleep(250 * time.Millisecond)
			if entries, _ := os.ReadDir(dir); len(entries) != 0 || a.running(mine) {
				t.Errorf("started in a freeze: %v", entries)
			}
			if how["detach"] != nil {
				a.thaw(true)
			}
			<-done
			a.shell("true")
			if entries, _ := os.ReadDir(dir); len(entries) != 1 {
				t.Errorf("%v", entries)
			}
		}
	})
}

// ghost asks for a command and hangs up before it can start.
func ghost(c *testhost.Client, req fields) {
	time.AfterFunc(100*time.Millisecond, c.Close)
	_, _ = c.Exec(context.Background(), req)
}

func TestKillInAFreeze(t *testing.T) {
	both(t, func(t *testing.T, a *agent) {
		marker := fmt.Sprintf("sleep 63.%d", os.Getpid())
		script := "setsid " + marker + " & " + marker
		for _, how := range []string{"delete", "reset", "timeout", "delete after loss"} {
			ctx, cancel := context.WithCancel(context.Background())
			req := fields{"id": nextID(), "shell": script}
			if how == "timeout" {
				req["timeout_ms"] = 600
			}
			_, done := a.stream(ctx, req)
			eventually(t, "it runs", func() bool { return alive(marker) >= 3 })
			a.freeze(fields{"timeout_ms": 30_000})
			if how == "delete after loss" {
				a.lose()
			}
			switch how {
			case "reset":
				cancel()
			case "timeout":
			default:
				a.call("DELETE", "/v1/exec/"+req["id"].(string), nil, &[]byte{})
			}
			eventually(t, "all are gone after "+how, func() bool { return alive(marker) == 0 })
			a.thaw(true)
			done()
			cancel()
			if res := a.shell("echo on"); string(res.Stdout) != "on\n" {
				t.Errorf("got %q", res.Stdout)
			}
		}
	})
}
