package proc

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"cloche.dev/agent/internal/wire"
)

func TestParseRequest(t *testing.T) {
	long := strings.Repeat("a", 200_000)
	tests := []struct {
		name, body  string
		status      int
		field, code string
	}{
		{"argv", `{"id":"a","argv":["x"]}`, 0, "", ""},
		{"shell", `{"id":"a-1","shell":"","env":{"A;touch /tmp/p;B":"x","a.b-c":""}}`, 0, "", ""},
		{"unknown fields are ignored", `{"id":"a","argv":["x"],"new":{"a":[1]}}`, 0, "", ""},
		{"not JSON", `{"id"`, 400, "body", "bad_request"},
		{"two values", `{"id":"a","argv":["x"]} {}`, 400, "body", "bad_request"},
		{"array", `[]`, 400, "", "bad_request"},
		{"no id", `{"argv":["x"]}`, 400, "id", "bad_request"},
		{"bad id", `{"id":"A","argv":["x"]}`, 400, "id", "bad_request"},
		{"id with a slash", `{"id":"a/../b","argv":["x"]}`, 400, "id", "bad_request"},
		{"neither", `{"id":"a"}`, 400, "argv", "bad_request"},
		{"both", `{"id":"a","argv":["x"],"shell":"y"}`, 400, "argv", "bad_request"},
		{"empty argv", `{"id":"a","argv":[]}`, 400, "argv", "bad_request"},
		{"empty program", `{"id":"a","argv":[""]}`, 400, "argv", "bad_request"},
		{"NUL", `{"id":"a","argv":["x\u0000y"]}`, 400, "argv", "bad_request"},
		{"env name", `{"id":"a","argv":["x"],"env":{"A=B":"1"}}`, 400, "env", "bad_request"},
		{"env empty name", `{"id":"a","argv":["x"],"env":{"":"1"}}`, 400, "env", "bad_request"},
		{"env NUL", `{"id":"a","argv":["x"],"env":{"A":"\u0000"}}`, 400, "env", "bad_request"},
		{"env type", `{"id":"a","argv":["x"],"env":{"A":1}}`, 400, "env", "bad_request"},
		{"cwd", `{"id":"a","argv":["x"],"cwd":"rel"}`, 400, "cwd", "bad_request"},
		{"timeout", `{"id":"a","argv":["x"],"timeout_ms":-1}`, 400, "timeout_ms", "bad_request"},
		{"timeout overflow", `{"id":"a","argv":["x"],"timeout_ms":9223372036854775807}`, 400, "timeout_ms", "bad_request"},
		{"timeout text", `{"id":"a","argv":["x"],"timeout_ms":"5"}`, 400, "timeout_ms", "bad_request"},
		{"max_output", `{"id":"a","argv":["x"],"max_output":99999999999}`, 400, "max_output", "bad_request"},
		{"stdin", `{"id":"a","argv":["x"],"stdin_b64":"!"}`, 400, "stdin_b64", "bad_request"},
		{"long argument", fmt.Sprintf(`{"id":"a","argv":["x",%q]}`, long), 413, "argv", "too_large"},
		{"long script", fmt.Sprintf(`{"id":"a","shell":%q}`, long), 413, "shell", "too_large"},
		{"long value", fmt.Sprintf(`{"id":"a","argv":["x"],"env":{"A":%q}}`, long), 413, "env", "too_large"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := ParseRequest(strings.NewReader(tt.body))
			if tt.status == 0 {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			var e *wire.Error
			if !errors.As(err, &e) {
				t.Fatalf("got %v", err)
			}
			if e.Status != tt.status || e.Field != tt.field || e.Code != tt.code {
				t.Errorf("got %+v", e)
			}
		})
	}
}

func FuzzParseRequest(f *testing.F) {
	f.Add([]byte(`{"id":"a","argv":["x"],"env":{"A":"b"},"cwd":"/","user":"u:g","timeout_ms":5}`))
	f.Add([]byte(`{"id":"a","shell":"echo","stdin_b64":"aGk=","detach":true,"max_output":7,"kill_on_limit":true}`))
	f.Add([]byte(`{"id":null,"argv":null,"shell":null}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := ParseRequest(strings.NewReader(string(b)))
		if err != nil {
			var e *wire.Error
			if !errors.As(err, &e) || e.Status < 400 || e.Status > 499 {
				t.Fatalf("%q: %v", b, err)
			}
			return
		}
		all := append([]string{r.Cwd}, r.Argv...)
		for k, v := range r.Env {
			if strings.ContainsAny(k, "=\x00") {
				t.Fatalf("name %q", k)
			}
			all = append(all, k, v)
		}
		if r.Shell != nil {
			all = append(all, *r.Shell)
		}
		for _, s := range all {
			if strings.Contains(s, "\x00") {
				t.Fatalf("NUL in %q", s)
			}
		}
		if !ValidID(r.ID) || (r.Shell != nil) == (r.Argv != nil) {
			t.Fatalf("accepted %q", b)
		}
	})
}
