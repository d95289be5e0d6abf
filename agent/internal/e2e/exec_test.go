package e2e

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"cloche.dev/agent/internal/wire"
)

func TestBackgroundChildDoesNotHoldTheCall(t *testing.T) {
	both(t, func(t *testing.T, a *agent) {
		marker := fmt.Sprintf("sleep 60.%d", os.Getpid())
		begin := time.Now()
		res := a.shell("echo first; (" + marker + "; echo late) &")
		if string(res.Stdout) != "first\n" || res.Exit.ExitCode != 0 || time.Since(begin) > 10*time.Second {
			t.Errorf("%q %+v after %v", res.Stdout, res.Exit, time.Since(begin))
		}
		if alive(marker) == 0 {
			t.Error("the background process is gone")
		}
		if res := a.shell("echo second"); string(res.Stdout) != "second\n" {
			t.Errorf("got %q", res.Stdout)
		}
		res = a.shell("head -c 3000000 /dev/zero | tr '\\0' y; " + marker + " &")
		if len(res.Stdout) != 3_000_000 || strings.Trim(string(res.Stdout), "y") != "" {
			t.Errorf("%d bytes", len(res.Stdout))
		}
		a.shell("pkill -f '" + marker[:len(marker)-1] + "[" + marker[len(marker)-1:] + "]'")
	})
}

// TestBackgroundWriter: what a background process writes later must neither
// block it nor kill it.
func TestBackgroundWriter(t *testing.T) {
	a := start(t)
	dir := t.TempDir()
	a.shell("(while [ ! -e " + dir + "/go ]; do sleep 0.01; done; head -c 1000000 /dev/zero && touch " + dir + "/done) &")
	if err := os.WriteFile(dir+"/go", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the writer has written everything", func() bool {
		_, err := os.Stat(dir + "/done")
		return err == nil
	})
}

func TestLargeOutput(t *testing.T) {
	a := start(t)
	res := a.shell("head -c 10485760 /dev/zero | tr '\\0' x >&2; exit 3")
	if len(res.Stderr) != 10<<20 || res.Exit.ExitCode != 3 || res.Exit.StderrBytes != 10<<20 {
		t.Errorf("%d bytes, %+v", len(res.Stderr), res.Exit)
	}
	res = a.shell("(head -c 4000000 /dev/zero | tr '\\0' e >&2) & head -c 4000000 /dev/zero | tr '\\0' o; wait")
	if len(res.Stdout) != 4_000_000 || len(res.Stderr) != 4_000_000 {
		t.Errorf("%d and %d bytes", len(res.Stdout), len(res.Stderr))
	}
	res = a.run(fields{"shell": "seq 1 100000", "max_output": 1000})
	if len(res.Stdout) != 1000 || len(res.Gaps) != 1 || !bytes.HasSuffix(res.Stdout, []byte("\n100000\n")) {
		t.Errorf("%d bytes, gaps %v", len(res.Stdout), res.Gaps)
	}
	res = a.run(fields{"shell": "yes", "max_output": 5000, "kill_on_limit": true})
	if len(res.Stdout) != 5000 || res.Exit.Reason != wire.ReasonOutputLimit {
		t.Errorf("%d bytes, %+v", len(res.Stdout), res.Exit)
	}
	res = a.run(fields{"shell": "printf 123456", "max_output": 5, "kill_on_limit": true})
	if string(res.Stdout) != "12345" || res.Exit.Reason != wire.ReasonOutputLimit {
		t.Errorf("%q, %+v", res.Stdout, res.Exit)
	}
}

func TestNoShellInBetween(t *testing.T) {
	a := start(t)
	dir := t.TempDir()
	args := []string{"a b", "$HOME", "x'y", "", "*", "line1\nline2", "日本"}
	res := a.run(fields{"argv": append([]string{"printf", "%s\\0"}, args...)})
	if got := strings.Join(args, "\x00") + "\x00"; string(res.Stdout) != got {
		t.Errorf("got %q", res.Stdout)
	}
	for script, want := range map[string]string{
		"seq 2 | wc -l": "2\n", "echo hi # note": "hi\n", "sleep 0 &": "",
	} {
		if res := a.shell(script); string(res.Stdout) != want {
			t.Errorf("%q: got %q", script, res.Stdout)
		}
	}
	key, value := "A;touch "+dir+"/pwn;B", "a'b\"c$(id)\nd"
	res = a.run(fields{"argv": []string{"env", "-0"}, "env": fields{key: value}})
	if !strings.Contains(string(res.Stdout), key+"="+value+"\x00") {
		t.Errorf("got %q", res.Stdout)
	}
	cwd := dir + "/x y$(touch pwn2)"
	_, e := a.call("POST", "/v1/exec", fields{"id": nextID(), "argv": []string{"pwd"}, "cwd": cwd}, nil)
	if e == nil || e.Status != 404 || e.Field != "cwd" {
		t.Errorf("missing directory: %+v", e)
	}
	if err := os.Mkdir(cwd, 0o700); err != nil {
		t.Fatal(err)
	}
	if res := a.run(fields{"argv": []string{"pwd"}, "cwd": cwd}); string(res.Stdout) != cwd+"\n" {
		t.Errorf("got %q", res.Stdout)
	}
	_, e = a.call("POST", "/v1/exec", fields{"id": nextID(), "argv": []string{"pwd"}, "cwd": cwd, "user": "54321"}, nil)
	if e == nil || e.Status != 403 || e.Field != "cwd" {
		t.Errorf("directory of somebody else: %+v", e)
	}
	_, e = a.call("POST", "/v1/exec", fields{"id": nextID(), "argv": []string{"pwd"}, "cwd": "/etc/passwd"}, nil)
	if e == nil || e.Code != "not_a_directory" || e.Field != "cwd" {
		t.Errorf("a file: %+v", e)
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 1 {
		t.Errorf("something ran: %v", entries)
	}
}

func TestTimeoutKillsTheWholeTree(t *testing.T) {
	both(t, func(t *testing.T, a *agent) {
		marker := fmt.Sprintf("sleep 61.%d", os.Getpid())
		res := a.run(fields{
			"shell": "(" + marker + ") & setsid sh -c '" + marker + "; true' & trap '' TERM; " +
				"echo so far; wait",
			"timeout_ms": 400,
		})
		if res.Exit.Reason != wire.ReasonTimeout || res.Exit.ExitCode != 137 || string(res.Stdout) != "so far\n" {
			t.Errorf("%q %+v", res.Stdout, res.Exit)
		}
		eventually(t, "all processes are gone", func() bool { return alive(marker) == 0 })
	})
}

func TestCancelKillsTheWholeTree(t *testing.T) {
	both(t, func(t *testing.T, a *agent) {
		marker := fmt.Sprintf("sleep 62.%d", os.Getpid())
		script := "setsid " + marker + " & " + marker
		for _, how := range []string{"reset", "delete", "hang up"} {
			ctx, cancel := context.WithCancel(context.Background())
			id := nextID()
			_, done := a.stream(ctx, fields{"id": id, "shell": script})
			eventually(t, "it runs", func() bool { return alive(marker) >= 3 })
			switch how {
			case "reset":
				cancel()
			case "delete":
				if status, _ := a.call("DELETE", "/v1/exec/"+id, nil, &[]byte{}); status != 204 {
					t.Errorf("status %d", status)
				}
			default:
				a.Client.Close()
				a.Client = a.connect()
			}
			eventually(t, "all are gone after "+how, func() bool { return alive(marker) == 0 })
			done()
			cancel()
		}
	})
}

func TestHowItEnded(t *testing.T) {
	a := start(t)
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/plain", []byte("#!/bin/sh\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/noloader", []byte("#!/no/such/interpreter\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		req    fields
		code   int
		reason string
		signal string
	}{
		{fields{"shell": "kill -9 $$"}, 137, "signaled", "SIGKILL"},
		{fields{"shell": "kill -SEGV $$"}, 139, "signaled", "SIGSEGV"},
		{fields{"shell": "exit 255"}, 255, "exited", ""},
		{fields{"shell": "exit 256"}, 0, "exited", ""},
		{fields{"shell": "no-such-program"}, 127, "exited", ""},
		{fields{"argv": []string{"no-such-program"}}, 127, "exited", ""},
		{fields{"argv": []string{dir + "/none"}}, 127, "exited", ""},
		{fields{"argv": []string{dir + "/plain"}}, 126, "exited", ""},
		{fields{"argv": []string{dir}}, 126, "exited", ""},
		{fields{"argv": []string{dir + "/noloader"}}, 127, "exited", ""},
	}
	for _, tt := range tests {
		res := a.run(tt.req)
		if res.Exit.ExitCode != tt.code || res.Exit.Reason != tt.reason || res.Exit.Signal != tt.signal {
			t.Errorf("%v: %+v", tt.req, res.Exit)
		}
		if tt.req["argv"] != nil && (res.Started.PID != 0 || res.Exit.Detail == "" || len(res.Stderr) == 0) {
			t.Errorf("%v: pid %d, %q, %+v", tt.req, res.Started.PID, res.Stderr, res.Exit)
		}
	}
	res := a.shell("bash -c 'yes | head -1; echo ${PIPESTATUS[0]}'; grep -E 'SigBlk|SigIgn' /proc/self/status | tr -d '\\t'; umask")
	want := "y\n141\nSigBlk:0000000000000000\nSigIgn:0000000000000000\n0022\n"
	if string(res.Stdout) != want {
		t.Errorf("got %q", res.Stdout)
	}
}

func TestChildGetsThreeDescriptors(t *testing.T) {
	a := start(t)
	// Asked one by one: a listing would show the pipe and the directory that it opens itself.
	res := a.shell("for i in $(seq 0 40); do [ -e /proc/$$/fd/$i ] && printf '%s ' $i; done; readlink /proc/self/fd/0; ulimit -Sn; ulimit -Hn; ulimit -c; " +
		"[ \"$(ps -o sid= -p $$ | tr -d ' ')\" = $$ ] && echo leads")
	var hard syscall.Rlimit
	_ = syscall.Getrlimit(syscall.RLIMIT_NOFILE, &hard)
	soft := uint64(65536)
	if syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: hard.Cur, Max: 1 << 20}) == nil {
		hard.Max = 1 << 20
	}
	want := fmt.Sprintf("0 1 2 /dev/null\n%d\n%d\n0\nleads\n", min(soft, hard.Max), hard.Max)
	if string(res.Stdout) != want {
		t.Errorf("got %q", res.Stdout)
	}
}

func TestEnvironmentAndUser(t *testing.T) {
	a := start(t)
	res := a.run(fields{"argv": []string{"sh", "-c", "id -u; id -g; id -G; pwd; env | sort; echo x > /dev/stdout"}, "user": "54321:7"})
	for _, want := range []string{"54321\n7\n7\n/\n", "HOME=/\n", "LANG=C.UTF-8\n", "USER=54321\n", "LOGNAME=54321\n", "PWD=/\n"} {
		if !strings.Contains(string(res.Stdout), want) {
			t.Errorf("no %q in %q", want, res.Stdout)
		}
	}
	if !bytes.HasSuffix(res.Stdout, []byte("x\n")) {
		t.Errorf("the user cannot open /dev/stdout: %q", res.Stderr)
	}
	if strings.Contains(string(res.Stdout), "TMPDIR") {
		t.Error("TMPDIR is set")
	}
	res = a.run(fields{"shell": "echo $HOME $PATH", "env": fields{"HOME": "/mine", "PATH": "/usr/bin:/bin"}})
	if string(res.Stdout) != "/mine /usr/bin:/bin\n" {
		t.Errorf("the request wins: %q", res.Stdout)
	}
	_, e := a.call("POST", "/v1/exec", fields{"id": nextID(), "argv": []string{"id"}, "user": "nobody-here"}, nil)
	if e == nil || e.Status != 404 || e.Field != "user" {
		t.Errorf("got %+v", e)
	}
}

func TestStdin(t *testing.T) {
	a := start(t)
	b64 := func(n int) string { return base64.StdEncoding.EncodeToString(bytes.Repeat([]byte("i"), n)) }
	if res := a.shell("cat; echo end"); string(res.Stdout) != "end\n" {
		t.Errorf("no input: %q", res.Stdout)
	}
	for _, n := range []int{0, 10, 65536, 65537, 5_000_000} {
		res := a.run(fields{"shell": "sleep 0.05; wc -c", "stdin_b64": b64(n)})
		if string(res.Stdout) != fmt.Sprintln(n) {
			t.Errorf("%d bytes: got %q", n, res.Stdout)
		}
	}
	for _, script := range []string{"exit 4", "head -c 1 >/dev/null; exit 4", "(sleep 60) & exit 4"} {
		if res := a.run(fields{"shell": script, "stdin_b64": b64(5_000_000)}); res.Exit.ExitCode != 4 {
			t.Errorf("%q: %+v", script, res.Exit)
		}
	}
}

func TestLimitsOfTheKernel(t *testing.T) {
	a := start(t)
	long := strings.Repeat("a", 200_000)
	env := fields{}
	for i := range 30 {
		env[fmt.Sprint("V", i)] = long[:100_000]
	}
	for field, req := range map[string]fields{
		"argv":  {"argv": []string{"/bin/echo", long}},
		"shell": {"shell": ": " + long},
		"env":   {"argv": []string{"true"}, "env": env},
	} {
		req["id"] = nextID()
		if _, e := a.call("POST", "/v1/exec", req, nil); e == nil || e.Status != 413 || e.Field != field {
			t.Errorf("%s: %+v", field, e)
		}
	}
	if res := a.run(fields{"argv": []string{"/bin/echo", long[:120_000]}}); len(res.Stdout) != 120_001 {
		t.Errorf("%d bytes, %+v", len(res.Stdout), res.Exit)
	}
}

// TestOrphansAreReaped makes many processes whose parents end before them.
func TestOrphansAreReaped(t *testing.T) {
	both(t, func(t *testing.T, a *agent) {
		a.shell("for i in $(seq 200); do (sh -c 'sleep 0.05 &'); done")
		zombies := func() int {
			n := 0
			res := a.shell("ps -o stat=,ppid= -e")
			for line := range strings.Lines(string(res.Stdout)) {
				if f := strings.Fields(line); len(f) == 2 && f[0][0] == 'Z' && f[1] == fmt.Sprint(a.pid) {
					n++
				}
			}
			return n
		}
		eventually(t, "no zombies", func() bool { return zombies() == 0 })
		for i := range 100 {
			if res := a.run(fields{"argv": []string{"sh", "-c", fmt.Sprint("printf x; exit ", i)}}); res.Exit.ExitCode != i {
				t.Fatalf("exit %d became %+v", i, res.Exit)
			}
		}
	})
}

func TestSignalNumberOfTheLeaderOnly(t *testing.T) {
	a := start(t)
	res := a.shell("sh -c 'kill -TERM $$'; exit 9")
	if res.Exit.ExitCode != 9 || res.Exit.SignalNumber != 0 || res.Exit.Reason != wire.ReasonExited {
		t.Errorf("got %+v", res.Exit)
	}
	res = a.shell(fmt.Sprintf("kill -%d $$", syscall.SIGTERM))
	if res.Exit.SignalNumber != 15 || res.Exit.ExitCode != 143 {
		t.Errorf("got %+v", res.Exit)
	}
}
