// Package e2e tests the whole agent in developer mode: an ordinary process
// that is spoken to as the server does it.
package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"cloche.dev/agent/internal/testhost"
	"cloche.dev/agent/internal/wire"
)

var binary string

func TestMain(m *testing.M) {
	if flag.Parse(); testing.Short() {
		fmt.Println("left out with -short: every test here starts an agent")
		os.Exit(0)
	}
	dir, err := os.MkdirTemp("", "cloche-e2e")
	if err != nil {
		panic(err)
	}
	binary = filepath.Join(dir, "cloche-agent")
	args := []string{"build", "-o", binary}
	if raceEnabled {
		args = append(args, "-race")
	}
	build := exec.Command("go", append(args, "cloche.dev/agent/cmd/cloche-agent")...)
	build.Stderr = os.Stderr
	if err := build.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "cannot build the agent:", err)
		os.Exit(1)
	}
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// agent is one running agent and a session with it.
type agent struct {
	*testhost.Client
	t    *testing.T
	pid  int
	sock string
}

// start runs an agent for one test.
func start(t *testing.T, args ...string) *agent {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	dir, err := os.MkdirTemp("", "agent")
	if err != nil {
		t.Fatal(err)
	}
	sock := filepath.Join(dir, "s")
	var log bytes.Buffer
	cmd := exec.Command(binary, append([]string{"--listen", "unix:" + sock}, args...)...)
	cmd.Stderr = &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		_ = os.RemoveAll(dir)
		if log.Len() > 0 {
			t.Errorf("the agent said: %s", log.String())
		}
	})
	a := &agent{t: t, pid: cmd.Process.Pid, sock: sock}
	a.Client = a.connect()
	return a
}

// connect opens another session.
func (a *agent) connect() *testhost.Client {
	a.t.Helper()
	c, err := testhost.Dial(a.sock, 10*time.Second)
	if err != nil {
		a.t.Fatal(err)
	}
	a.t.Cleanup(c.Close)
	return c
}

// both runs a test with cgroups, if the machine has them, and without.
func both(t *testing.T, fn func(t *testing.T, a *agent)) {
	for _, root := range []string{"auto", "none"} {
		t.Run("cgroup="+root, func(t *testing.T) { fn(t, start(t, "--root-cgroup", root)) })
	}
}

type fields map[string]any

var ids atomic.Int64

func nextID() string { return fmt.Sprintf("e%d", ids.Add(1)) }

// run executes a request that must be accepted.
func (a *agent) run(req fields) *testhost.Result {
	a.t.Helper()
	res, err := a.try(req)
	if err != nil {
		a.t.Fatalf("%.200v: %v", req, err)
	}
	return res
}

func (a *agent) try(req fields) (*testhost.Result, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	if req["id"] == nil {
		req["id"] = nextID()
	}
	return a.Exec(ctx, req)
}

func (a *agent) shell(script string) *testhost.Result {
	a.t.Helper()
	return a.run(fields{"shell": script})
}

// call makes a JSON call and returns the status, or the error's.
func (a *agent) call(method, path string, in, out any) (int, *wire.Error) {
	a.t.Helper()
	status, err := a.Do(context.Background(), method, path, in, out)
	var e *wire.Error
	if errors.As(err, &e) {
		return e.Status, e
	}
	if err != nil {
		a.t.Fatalf("%s %s: %v", method, path, err)
	}
	return status, nil
}

// stream starts a command and leaves its frames to be read.
func (a *agent) stream(ctx context.Context, req fields) (*json.Decoder, func()) {
	a.t.Helper()
	b, _ := json.Marshal(req)
	res, err := a.Open(ctx, "POST", "/v1/exec", bytes.NewReader(b))
	if err != nil {
		a.t.Fatal(err)
	}
	return json.NewDecoder(res.Body), func() { _ = res.Body.Close() }
}

// eventually waits for a condition that somebody else brings about.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("still not: %s", what)
		}
	}
}

// alive counts the processes with a marker in their command line.
func alive(marker string) int {
	n := 0
	paths, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, p := range paths {
		if b, err := os.ReadFile(p); err == nil && bytes.Contains(bytes.ReplaceAll(b, []byte{0}, []byte(" ")), []byte(marker)) {
			n++
		}
	}
	return n
}
