package services

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cloche.dev/agent/internal/proc"
	"cloche.dev/agent/internal/wire"
)

func spec(t *testing.T, name, body string) *Spec {
	t.Helper()
	s, err := Parse(name, []byte(body))
	if err != nil {
		t.Fatalf("%s: %v", body, err)
	}
	return s
}

func TestParseRefuses(t *testing.T) {
	for body, field := range map[string]string{
		`{`:                                                             "body",
		`{}`:                                                            "argv",
		`{"shell":"x","argv":["x"]}`:                                    "argv",
		`{"shell":"x","restart":"maybe"}`:                               "restart",
		`{"shell":"x","cwd":"relative"}`:                                "cwd",
		`{"shell":"x","log_bytes":1}`:                                   "log_bytes",
		`{"shell":"x","stop_signal":"NONE"}`:                            "stop_signal",
		`{"shell":"x","stop_grace_ms":3600000}`:                         "stop_grace_ms",
		`{"shell":"x","backoff_ms":-1}`:                                 "backoff_ms",
		`{"shell":"x","max_restarts":-1}`:                               "max_restarts",
		`{"shell":"x","backoff_ms":9,"max_backoff_ms":8}`:               "max_backoff_ms",
		`{"shell":"x","rlimits":{"what":1}}`:                            "rlimits",
		`{"shell":"x","health":{}}`:                                     "health",
		`{"shell":"x","health":{"tcp_port":70000}}`:                     "health",
		`{"shell":"x","health":{"tcp_port":1,"argv":["x"]}}`:            "health",
		`{"shell":"x","health":{"http":{"port":1,"path":"x"}}}`:         "health",
		`{"shell":"x","health":{"http":{"port":1,"path":"/\r\nX: y"}}}`: "health",
		`{"shell":"x","health":{"http":{"port":1,"status":99}}}`:        "health",
		`{"shell":"x","health":{"argv":[""]}}`:                          "health",
		`{"shell":"x","health":{"tcp_port":1,"retries":-1}}`:            "health",
		`{"shell":"x","health":{"tcp_port":1,"on_unhealthy":"panic"}}`:  "health",
	} {
		_, err := Parse("web", []byte(body))
		var e *wire.Error
		if !errors.As(err, &e) || e.Status != 400 || e.Field != field {
			t.Errorf("%s: %+v", body, err)
		}
	}
	for _, name := range []string{"", "-a", "A", "a b", strings.Repeat("a", 49)} {
		if _, err := Parse(name, []byte(`{"shell":"x"}`)); err == nil {
			t.Errorf("%q is a name", name)
		}
	}
}

func TestBackoffGrows(t *testing.T) {
	s := spec(t, "a", `{"shell":"x","backoff_ms":100,"max_backoff_ms":1000}`)
	for restarts, want := range map[int]int64{0: 100, 1: 200, 3: 800, 4: 1000, 1000: 1000} {
		if got := backoff(s, restarts).Milliseconds(); got != want {
			t.Errorf("after %d: %d ms", restarts, got)
		}
	}
}

func TestPulse(t *testing.T) {
	s := spec(t, "a", `{"shell":"x","health":{"tcp_port":1,"retries":2,"start_ms":3600000,"interval_ms":60000}}`)
	p := &pulse{h: s.Health, began: time.Now()}
	if p.next() != eager {
		t.Error("it is not asked often while it starts")
	}
	for range 5 {
		if news, _ := p.add(true); news || p.failures > 0 {
			t.Fatal("a failure counts in the start period")
		}
	}
	told := ""
	for _, bad := range []bool{false, false, true, false, true, true, true, false} {
		news, well := p.add(bad)
		told += fmt.Sprint(map[bool]string{true: "!"}[news], map[bool]string{true: "+", false: "-"}[well], " ")
	}
	// Well, twice; one failure that is made up for; two in a row, and no news of the third; well again.
	if told != "!+ + - + - !- - !+ " {
		t.Errorf("got %q", told)
	}
	if p.next() != time.Minute {
		t.Error("it is still asked often")
	}
	late := &pulse{h: s.Health, began: time.Now().Add(-2 * time.Hour)}
	late.add(true)
	if news, _ := late.add(true); !news {
		t.Error("it may start for ever")
	}
}

func TestOrdered(t *testing.T) {
	others := []*Spec{spec(t, "a", `{"shell":"x"}`), spec(t, "b", `{"shell":"x","depends_on":["a"]}`)}
	if err := ordered(others, spec(t, "c", `{"shell":"x","depends_on":["b","a"]}`)); err != nil {
		t.Error(err)
	}
	if ordered(others, spec(t, "c", `{"shell":"x","depends_on":["d"]}`)) == nil {
		t.Error("it may depend on nothing")
	}
	if ordered(others[1:], spec(t, "a", `{"shell":"x","depends_on":["b"]}`)) == nil {
		t.Error("a circle")
	}
	if ordered(nil, spec(t, "a", `{"shell":"x","depends_on":["a"]}`)) == nil {
		t.Error("it may depend on itself")
	}
}

func manager(t *testing.T, path string, said *[]string) *Manager {
	t.Helper()
	procs, err := proc.NewManager(&proc.Manager{})
	if err != nil {
		t.Fatal(err)
	}
	return New(&Manager{Procs: procs, Path: path, Logf: func(format string, args ...any) {
		*said = append(*said, fmt.Sprintf(format, args...))
	}})
}

func TestKept(t *testing.T) {
	var said []string
	path := filepath.Join(t.TempDir(), "deep", "services.json")
	m := manager(t, path, &said)
	if m.load() != nil || said != nil {
		t.Error("nothing is not nothing")
	}
	want := spec(t, "a", `{"shell":"x","autostart":false,"env":{},"depends_on":[],"max_restarts":0,"health":{"tcp_port":1,"start_ms":0}}`)
	if err := m.save([]*Spec{want}); err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("others may read it: %v %v", st.Mode(), err)
	}
	if got := m.load(); len(got) != 1 || !got[0].same(want) {
		t.Errorf("got %+v", got)
	}
	m.Boot()
	if got := m.List(); len(got) != 1 || got[0].State != stateStopped || got[0].Name != "a" {
		t.Errorf("got %+v", got)
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), "*")); len(left) != 1 {
		t.Errorf("left behind: %v", left)
	}
}

// TestDamaged reads what root in the machine may have written.
func TestDamaged(t *testing.T) {
	path := filepath.Join(t.TempDir(), "services.json")
	for content, want := range map[string]int{
		"": 0, "{": 0, `{"services":{}}`: 0, `{"services":[1,{"name":"A","shell":"x"},{"name":"b","shell":"x"}]}`: 1,
		`{"services":[` + strings.Repeat(`{"name":"b","shell":"x"},`, 40) + `{}]}`: 0,
	} {
		var said []string
		m := manager(t, path, &said)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := m.load(); len(got) != want || len(said) == 0 {
			t.Errorf("%.60s: %d, said %q", content, len(got), said)
		}
	}
	var said []string
	if got := manager(t, filepath.Dir(path), &said).load(); got != nil || len(said) != 1 {
		t.Errorf("a directory: %v %q", got, said)
	}
}
