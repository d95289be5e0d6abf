package e2e

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cloche.dev/agent/internal/proc"
	"cloche.dev/agent/internal/services"
	"cloche.dev/agent/internal/testhost"
)

func (a *agent) service(name string) services.Info {
	a.t.Helper()
	var info services.Info
	if _, e := a.call("GET", "/v1/services/"+name, nil, &info); e != nil {
		a.t.Fatalf("%s: %+v", name, e)
	}
	return info
}

func (a *agent) define(name string, spec fields) services.Info {
	a.t.Helper()
	var info services.Info
	if _, e := a.call("PUT", "/v1/services/"+name, spec, &info); e != nil {
		a.t.Fatalf("%s: %+v", name, e)
	}
	return info
}

func (a *agent) until(name, state string) services.Info {
	a.t.Helper()
	var info services.Info
	if _, e := a.call("GET", "/v1/services/"+name+"/wait?timeout_ms=20000&states="+state, nil, &info); e != nil {
		a.t.Fatalf("%s: %+v", name, e)
	}
	if info.State != state {
		a.t.Fatalf("%s is not %s: %+v", name, state, info)
	}
	return info
}

func TestServiceLives(t *testing.T) {
	both(t, func(t *testing.T, a *agent) {
		mark := fmt.Sprintf("%d", 86000+os.Getpid()%1000)
		// What it leaves in the background ends with it.
		spec := fields{"shell": "echo begin; sleep " + mark + "1 & sleep " + mark + "0; wait", "backoff_ms": 10, "restart": "always"}
		a.define("web", spec)
		first := a.until("web", "healthy")
		if first.PID == 0 || first.Process == "" || first.Restarts != 0 {
			t.Fatalf("got %+v", first)
		}
		var p proc.Info
		a.call("GET", "/v1/exec/"+first.Process, nil, &p)
		if !p.Running || !p.Detach || p.PID != first.PID {
			t.Errorf("as a process: %+v", p)
		}
		if again := a.define("web", spec); again.PID != first.PID {
			t.Error("the same definition has started it anew")
		}
		a.call("POST", "/v1/exec/"+first.Process+"/signal", fields{"signal": "KILL"}, &[]byte{})
		eventually(t, "it is started again", func() bool {
			now := a.service("web")
			return now.State == "healthy" && now.Restarts == 1 && now.PID != first.PID && now.LastExit != nil && now.LastExit.ExitCode == 137
		})
		// The shell of the second one, and what it has in the background.
		eventually(t, "what the first one left has ended", func() bool { return alive("sleep "+mark+"1") == 2 })
		a.call("POST", "/v1/services/web/stop", nil, &services.Info{})
		if now := a.service("web"); now.State != "stopped" || now.PID != 0 {
			t.Errorf("got %+v", now)
		}
		// Without a cgroup what it left is killed, and nobody waits for it.
		eventually(t, "none of its processes is left", func() bool { return alive("sleep "+mark) == 0 })
		if status, _ := a.call("DELETE", "/v1/services/web", nil, &[]byte{}); status != 204 {
			t.Errorf("got %d", status)
		}
		if _, e := a.call("GET", "/v1/services/web", nil, nil); e == nil || e.Status != 404 || e.Field != "name" {
			t.Errorf("got %+v", e)
		}
	})
}

func TestServicePolicies(t *testing.T) {
	a := start(t)
	for name, c := range map[string]struct {
		spec     fields
		state    string
		restarts int
		code     int
	}{
		"fine":    {fields{"shell": "exit 0"}, "stopped", 0, 0},
		"once":    {fields{"shell": "exit 3", "restart": "no"}, "failed", 0, 3},
		"looping": {fields{"shell": "exit 4", "backoff_ms": 1, "max_restarts": 3}, "failed", 3, 4},
		"missing": {fields{"argv": []string{"/none"}, "backoff_ms": 1, "max_restarts": 1}, "failed", 1, 127},
	} {
		a.define(name, c.spec)
		info := a.until(name, c.state)
		if info.Restarts != c.restarts || info.LastExit == nil || info.LastExit.ExitCode != c.code {
			t.Errorf("%s: %+v", name, info)
		}
		if (c.state == "failed") != (info.Detail != "") {
			t.Errorf("%s does not say why: %q", name, info.Detail)
		}
	}
	a.define("nobody", fields{"shell": "x", "user": "no-such-user", "restart": "no"})
	if info := a.until("nobody", "failed"); info.LastExit != nil || !strings.Contains(info.Detail, "user") {
		t.Errorf("got %+v", info)
	}
	a.define("slow", fields{"shell": "exit 1", "backoff_ms": 3600000, "max_backoff_ms": 3600000})
	if info := a.until("slow", "backoff"); info.RetryMS <= 0 {
		t.Errorf("got %+v", info)
	}
	a.call("POST", "/v1/services/slow/start", nil, &services.Info{})
	eventually(t, "a start does not wait", func() bool { i := a.service("slow"); return i.Restarts == 1 && i.State == "backoff" })
	if info := func() (i services.Info) { a.call("POST", "/v1/services/slow/stop", nil, &i); return }(); info.State != "stopped" {
		t.Errorf("got %+v", info)
	}
}

func TestServiceHealth(t *testing.T) {
	both(t, func(t *testing.T, a *agent) {
		dir := t.TempDir()
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		port := l.Addr().(*net.TCPAddr).Port
		_ = l.Close()
		check := fields{"interval_ms": 20, "retries": 2, "tcp_port": port}
		a.define("tcp", fields{"shell": "exec sleep 600", "health": check, "restart": "no"})
		eventually(t, "it says what is missing", func() bool { i := a.service("tcp"); return i.State == "starting" && i.Detail != "" })
		if l, err = net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err != nil {
			t.Fatal(err)
		}
		before := a.until("tcp", "healthy")
		_ = l.Close()
		if now := a.until("tcp", "unhealthy"); now.PID != before.PID || now.Failures < 2 {
			t.Errorf("got %+v", now)
		}
		// A command, as the service's own user sees it; and the restart of what is not well.
		flag := filepath.Join(dir, "well")
		touch := func() {
			if err := os.WriteFile(flag, nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		touch()
		a.define("command", fields{"shell": "exec sleep 600", "backoff_ms": 10, "stop_grace_ms": 5000,
			"health": fields{"argv": []string{"test", "-e", flag}, "interval_ms": 20, "retries": 2}})
		first := a.until("command", "healthy")
		_ = os.Remove(flag)
		eventually(t, "it is started again", func() bool { i := a.service("command"); return i.Restarts == 1 && i.PID != 0 && i.PID != first.PID })
		touch()
		a.until("command", "healthy")
		var list struct {
			Execs []proc.Info `json:"execs"`
		}
		a.call("GET", "/v1/exec", nil, &list)
		for _, e := range list.Execs {
			if strings.HasPrefix(e.ID, "check-") {
				t.Errorf("a check is told: %+v", e)
			}
		}
	})
}

func TestServiceOrder(t *testing.T) {
	a := start(t)
	dir := t.TempDir()
	go_ := filepath.Join(dir, "go")
	a.define("migrate", fields{"shell": "while [ ! -e " + go_ + " ]; do sleep 0.01; done; echo migrate >>" + dir + "/order", "restart": "no",
		"health": fields{"argv": []string{"false"}}}) // it is there when it has done its work
	a.define("db", fields{"shell": "echo db >>" + dir + "/order; exec sleep 600", "depends_on": []string{"migrate"},
		"health": fields{"argv": []string{"grep", "-q", "db", dir + "/order"}, "interval_ms": 20}})
	a.define("web", fields{"shell": "echo web >>" + dir + "/order; exec sleep 600", "depends_on": []string{"db"}})
	a.until("migrate", "starting")
	if db := a.service("db"); db.State != "starting" || len(db.Waiting) != 1 || db.PID != 0 {
		t.Errorf("got %+v", db)
	}
	a.call("POST", "/v1/services/migrate/stop", nil, &services.Info{})
	a.call("POST", "/v1/services/web/stop", nil, &services.Info{})
	a.call("POST", "/v1/services/db/stop", nil, &services.Info{})
	_ = os.WriteFile(go_, nil, 0o600)
	_ = os.Remove(dir + "/order")
	a.call("POST", "/v1/services/web/start", nil, &services.Info{})
	a.until("web", "healthy")
	eventually(t, "all have begun", func() bool { b, _ := os.ReadFile(dir + "/order"); return strings.Contains(string(b), "web") })
	if b, _ := os.ReadFile(dir + "/order"); string(b) != "migrate\ndb\nweb\n" {
		t.Errorf("got %q", b)
	}
	if _, e := a.call("DELETE", "/v1/services/db", nil, nil); e == nil || e.Status != 409 || e.Field != "name" {
		t.Errorf("got %+v", e)
	}
	if _, e := a.call("PUT", "/v1/services/migrate", fields{"shell": "x", "depends_on": []string{"web"}}, nil); e == nil || e.Status != 409 {
		t.Errorf("got %+v", e)
	}
}

func (a *agent) log(name string, from uint64, bytes int) string {
	a.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	res, err := a.Open(ctx, "GET", fmt.Sprintf("/v1/services/%s/output?from=%d", name, from), nil)
	if err != nil {
		a.t.Fatal(err)
	}
	defer res.Body.Close()
	out := &testhost.Result{}
	for len(out.Stdout)+len(out.Stderr) < bytes {
		if err := out.Next(res.Body); err != nil {
			a.t.Fatalf("%q: %v", out.Stdout, err)
		}
	}
	return string(out.Stdout)
}

func TestServiceLogAndBoot(t *testing.T) {
	dir := t.TempDir()
	a := start(t, "--state", dir)
	a.define("tick", fields{"shell": "echo a run; exit 1", "backoff_ms": 1, "max_restarts": 2})
	info := a.until("tick", "failed")
	if got := a.log("tick", 0, 18); got != "a run\na run\na run\n" || info.Log.Epoch == "" || info.Log.First != 0 {
		t.Errorf("%q %+v", got, info.Log)
	}
	if got := a.log("tick", 6, 12); got != "a run\na run\n" {
		t.Errorf("from the second: %q", got)
	}
	if _, e := a.call("GET", "/v1/services/tick/output?from=99", nil, nil); e == nil || e.Status != 400 || e.Field != "from" {
		t.Errorf("got %+v", e)
	}
	a.define("off", fields{"shell": "exec sleep 600", "autostart": false})
	a.define("web", fields{"shell": "exec sleep 600"})
	a.until("web", "healthy")
	// Another start of the machine.
	b := start(t, "--state", dir)
	b.until("web", "healthy")
	if off := b.service("off"); off.State != "stopped" || off.PID != 0 {
		t.Errorf("got %+v", off)
	}
	if now := b.until("tick", "failed"); now.Log.Epoch == info.Log.Epoch {
		t.Error("an old offset means something in the new log")
	}
	b.call("DELETE", "/v1/services/web", nil, &[]byte{})
	if _, e := start(t, "--state", dir).call("GET", "/v1/services/web", nil, nil); e == nil || e.Status != 404 {
		t.Errorf("it has come back: %+v", e)
	}
}

func TestServicesInAHold(t *testing.T) {
	a := start(t)
	a.define("web", fields{"shell": "sleep 0.2; exit 1", "backoff_ms": 1, "max_restarts": 0})
	if _, e := a.call("POST", "/v1/freeze", fields{"timeout_ms": 60000}, &[]byte{}); e != nil {
		t.Fatalf("%+v", e)
	}
	before := a.service("web")
	a.call("POST", "/v1/thaw", fields{"keep": true}, &[]byte{})
	eventually(t, "it goes on", func() bool { return a.service("web").Restarts > before.Restarts })
}

func TestServiceLimits(t *testing.T) {
	a := start(t)
	for i := range 32 {
		a.define(fmt.Sprintf("s%d", i), fields{"shell": "x", "autostart": false})
	}
	if _, e := a.call("PUT", "/v1/services/more", fields{"shell": "x"}, nil); e == nil || e.Status != 409 || e.Field != "services" {
		t.Errorf("got %+v", e)
	}
	a.define("s1", fields{"shell": "y", "autostart": false})
	if _, e := a.call("PUT", "/v1/services/s2", fields{"shell": strings.Repeat("x", 200<<10)}, nil); e == nil || e.Status != 413 {
		t.Errorf("got %+v", e)
	}
}
