package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"cloche.dev/agent/internal/files"
	"cloche.dev/agent/internal/testhost"
)

func (a *agent) descriptors() int {
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", a.pid))
	if err != nil {
		a.t.Fatal(err)
	}
	return len(entries)
}

func (a *agent) rssKB() int {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", a.pid))
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "VmRSS:" {
			n, _ := strconv.Atoi(f[1])
			return n
		}
	}
	return 0
}

func TestNoDescriptorLeaks(t *testing.T) {
	both(t, func(t *testing.T, a *agent) {
		round := func() {
			a.run(fields{"argv": []string{"true"}})
			a.run(fields{"argv": []string{"no-such-program"}})
			a.run(fields{"argv": []string{"/etc/passwd"}})
			a.run(fields{"detach": true, "argv": []string{"true"}})
			a.run(fields{"shell": "sleep 60", "timeout_ms": 1})
			a.run(fields{"shell": "exit", "stdin_b64": strings.Repeat("aGlp", 40000)})
			a.run(fields{"shell": "true", "user": "54321"})
			ctx, cancel := context.WithCancel(context.Background())
			_, done := a.stream(ctx, fields{"id": nextID(), "shell": "sleep 60"})
			cancel()
			done()
			a.call("GET", "/v1/dir?path=/etc", nil, &files.Listing{})
			a.call("PUT", "/v1/files?path="+t.TempDir()+"/f", []byte("x"), &files.Written{})
			a.call("GET", "/v1/files?path=/etc/passwd", nil, &[]byte{})
			a.call("GET", "/v1/files?path=/no", nil, nil)
			a.Client.Close()
			a.Client = a.connect()
		}
		for range 20 { // the groups that are kept for later come first
			round()
		}
		before := a.descriptors()
		for range 20 {
			round()
		}
		eventually(t, "as many descriptors as before", func() bool { return a.descriptors() <= before+4 })
	})
}

// TestSlowReader lets one command fill its pipe while others go on.
func TestSlowReader(t *testing.T) {
	a := start(t)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	for range 20 {
		_, done := a.stream(ctx, fields{"id": nextID(), "shell": "cat /dev/zero"})
		defer done()
	}
	a.shell("true")
	base := a.rssKB()
	for range 20 {
		if res := a.shell("echo quick"); string(res.Stdout) != "quick\n" {
			t.Fatalf("got %q", res.Stdout)
		}
	}
	if grown := a.rssKB() - base; grown > 20_000 {
		t.Errorf("the agent grew by %d kB", grown)
	}
}

func TestMemoryStaysFlat(t *testing.T) {
	a := start(t)
	a.shell("head -c 20000000 /dev/zero")
	base := a.rssKB()
	res, err := a.Open(context.Background(), "POST", "/v1/exec",
		strings.NewReader(`{"id":"flat","shell":"head -c 500000000 /dev/zero"}`))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	n, err := io.Copy(io.Discard, res.Body)
	if err != nil || n < 500_000_000 {
		t.Fatalf("%d bytes, %v", n, err)
	}
	if grown := a.rssKB() - base; grown > 20_000 {
		t.Errorf("the agent grew by %d kB", grown)
	}
}

func TestSlowClientGetsEveryByte(t *testing.T) {
	a := start(t)
	res, err := a.Open(context.Background(), "POST", "/v1/exec",
		strings.NewReader(`{"id":"slow","shell":"seq 1 300000"}`))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	r, err := testhost.Collect(&slow{r: res.Body})
	if err != nil {
		t.Fatal(err)
	}
	var want bytes.Buffer
	for i := range 300_000 {
		fmt.Fprintln(&want, i+1)
	}
	if sha256.Sum256(r.Stdout) != sha256.Sum256(want.Bytes()) {
		t.Errorf("%d of %d bytes", len(r.Stdout), want.Len())
	}
}

// slow pauses now and then, so that every window and pipe fills up.
type slow struct {
	r io.Reader
	n int
}

func (s *slow) Read(p []byte) (int, error) {
	if s.n++; s.n%2000 == 0 {
		time.Sleep(time.Millisecond)
	}
	return s.r.Read(p)
}

func TestManyAtOnce(t *testing.T) {
	a := start(t)
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			res, err := a.try(fields{"shell": fmt.Sprintf("seq %d 20000; exit %d", i, i)})
			if err != nil || res.Exit.ExitCode != i || !bytes.HasPrefix(res.Stdout, []byte(strconv.Itoa(i)+"\n")) ||
				!bytes.HasSuffix(res.Stdout, []byte("\n20000\n")) {
				t.Errorf("%d: %v", i, err)
			}
		}()
	}
	wg.Wait()
}

func TestReconnectInMidStream(t *testing.T) {
	a := start(t)
	for i := range 20 {
		ctx, cancel := context.WithCancel(context.Background())
		_, done := a.stream(ctx, fields{"id": nextID(), "shell": "cat /dev/zero"})
		a.Client.Close()
		a.Client = a.connect()
		if res := a.shell("echo again"); string(res.Stdout) != "again\n" {
			t.Fatalf("round %d: %q", i, res.Stdout)
		}
		done()
		cancel()
	}
	eventually(t, "all streams are cancelled", func() bool {
		var list struct {
			Execs []any `json:"execs"`
		}
		a.call("GET", "/v1/exec", nil, &list)
		return len(list.Execs) == 0
	})
}

func TestFilesOverTheLink(t *testing.T) {
	a := start(t)
	dir := t.TempDir()
	data := bytes.Repeat([]byte("0123456789abcdef"), 200_000)
	for _, name := range []string{"a b", "🤣.txt", "e\u0301", "50%2Foff", "q?x=1&y#z", "a+b", `"'`, "-rf", ".hidden", "n\nl\tt\\", "$(touch pwn)", strings.Repeat("x", 255), "bad\xff\xfename"} {
		for _, size := range []int{0, 120 << 10, len(data)} {
			q := "path=" + url.QueryEscape(dir+"/"+name)
			if name[0] == 'b' {
				q = "path_b64=" + files.B64.EncodeToString([]byte(dir+"/"+name))
			}
			var w files.Written
			if _, e := a.call("PUT", "/v1/files?mode=640&"+q, data[:size], &w); e != nil || w.Bytes != int64(size) {
				t.Fatalf("%q: %v %+v", name, e, w)
			}
			var back []byte
			a.call("GET", "/v1/files?"+q, nil, &back)
			if !bytes.Equal(back, data[:size]) {
				t.Errorf("%q: %d bytes came back as %d", name, size, len(back))
			}
		}
		if _, err := os.Stat(dir + "/" + name); err != nil {
			t.Error(err)
		}
	}
	var l files.Listing
	if a.call("GET", "/v1/dir?path="+dir, nil, &l); len(l.Entries) != 13 {
		t.Errorf("%d entries", len(l.Entries))
	}
	_, e := a.call("PUT", "/v1/files?path="+url.QueryEscape(dir+"/"+strings.Repeat("x", 256)), []byte("x"), nil)
	if e == nil || e.Status != 413 {
		t.Errorf("got %+v", e)
	}
	for path, want := range map[string]string{
		"GET /v1/files": "path", "GET /v1/files?path=rel": "path", "PUT /v1/files?path=/x&mode=999": "mode",
		"GET /v1/dir?path=/&limit=0": "limit", "GET /v1/stat?path=/&follow=x": "follow",
		"GET /v1/dir?path=/&after=!": "after", "POST /v1/move?path=/x&to=y": "to", "GET /v1/stat?path_b64=!": "path_b64",
	} {
		method, p, _ := strings.Cut(path, " ")
		if _, e := a.call(method, p, nil, nil); e == nil || e.Status != 400 || e.Field != want {
			t.Errorf("%s: %+v", path, e)
		}
	}
}

// TestUploadCutByTheHost hangs up in the middle of an upload.
func TestUploadCutByTheHost(t *testing.T) {
	a := start(t)
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/f", []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, extra := range []string{"", "&append=1"} {
		pr, pw := io.Pipe()
		finished := make(chan struct{})
		go func() {
			defer close(finished)
			res, err := a.Open(context.Background(), "PUT", "/v1/files?path="+dir+"/f"+extra, pr)
			if err == nil {
				_ = res.Body.Close()
			}
		}()
		_, _ = pw.Write(make([]byte, 300_000))
		a.Client.Close()
		<-finished
		_ = pw.Close()
		a.Client = a.connect()
		eventually(t, "the temporary file is gone", func() bool {
			entries, _ := os.ReadDir(dir)
			return len(entries) == 1
		})
		if b, _ := os.ReadFile(dir + "/f"); string(b) != "old" {
			t.Errorf("the file has become %d bytes", len(b))
		}
	}
}

func TestDeveloperModeLeavesTheMachineAlone(t *testing.T) {
	a := start(t)
	name, _ := os.Hostname()
	var got struct {
		Steps map[string]float64 `json:"steps"`
	}
	_, e := a.call("POST", "/v1/renew", fields{"time_ns": 1, "hostname": "changed", "machine_id": strings.Repeat("0", 32), "grow_disk": true}, &got)
	if e != nil || len(got.Steps) != 0 {
		t.Errorf("%+v %v", got, e)
	}
	if now, _ := os.Hostname(); now != name || time.Now().Year() < 2000 {
		t.Errorf("the host has changed: %s", now)
	}
	for field, body := range map[string]fields{
		"hostname": {"hostname": "Bad_Name"}, "machine_id": {"machine_id": "xyz"}, "entropy": {"entropy": "aGk="}, "time_ns": {"time_ns": "x"}, "ca_pem": {"ca_pem": "x"},
	} {
		if _, e := a.call("POST", "/v1/renew", body, nil); e == nil || e.Status != 400 || e.Field != field {
			t.Errorf("%s: %+v", field, e)
		}
	}
	var info map[string]any
	if a.call("GET", "/v1/info", nil, &info); info["generation"] != 1.0 || info["pid"] != float64(a.pid) {
		t.Errorf("got %v", info)
	}
	if status, _ := a.call("POST", "/v1/quiesce", nil, nil); status != 200 {
		t.Errorf("status %d", status)
	}
	if _, e := a.call("POST", "/v1/nonsense", nil, nil); e == nil || e.Code != "not_found" {
		t.Errorf("got %+v", e)
	}
}
