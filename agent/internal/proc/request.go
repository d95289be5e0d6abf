package proc

import (
	"encoding/json"
	"errors"
	"io"
	"math"
	"strings"
	"time"

	"cloche.dev/agent/internal/wire"
)

// Request is the body of POST /v1/exec.
type Request struct {
	ID          string            `json:"id"`
	Argv        []string          `json:"argv"`
	Shell       *string           `json:"shell"`
	Env         map[string]string `json:"env"`
	Cwd         string            `json:"cwd"`
	User        string            `json:"user"`
	Stdin       []byte            `json:"stdin_b64"`
	TimeoutMS   int64             `json:"timeout_ms"`
	Detach      bool              `json:"detach"`
	MaxOutput   int64             `json:"max_output"`
	KillOnLimit bool              `json:"kill_on_limit"`

	StdinMode string           `json:"stdin"` // "", "none" or "pipe"
	PTY       *Size            `json:"pty"`
	Rlimits   map[string]int64 `json:"rlimits"`
	Tools     bool             `json:"tools"` // descriptor 3 is this very program

	// Of attached commands.
	OnLost string `json:"on_lost"` // "", "kill" or "hangup"

	// Of detached commands.
	RecordBytes int    `json:"record_bytes"`
	LingerMS    int64  `json:"linger_ms"`
	Tag         string `json:"tag"`

	// Of commands that the agent starts by itself.
	Log   *Log `json:"-"` // the output goes there as well
	Sweep bool `json:"-"` // what the leader leaves behind ends with it
}

const (
	// maxBody bounds a request, which is held in memory. Larger input belongs
	// into a file.
	maxBody = 16 << 20
	// maxOutputLimit bounds max_output, half of which is held in memory.
	maxOutputLimit = 64 << 20
	// maxString is the kernel's limit for one argument or environment
	// string with its final NUL.
	maxString = 128 << 10
)

// ParseRequest reads and checks a request.
func ParseRequest(body io.Reader) (*Request, error) {
	lr := &io.LimitedReader{R: body, N: maxBody + 1}
	var r Request
	dec := json.NewDecoder(lr)
	if err := dec.Decode(&r); err != nil {
		if lr.N <= 0 {
			return nil, wire.TooLarge("body", "the request is over 16 MiB")
		}
		return nil, JSONError(err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return nil, wire.BadRequest("body", "more than one JSON value")
	}
	return &r, r.check()
}

// JSONError says which field of a JSON body is wrong.
func JSONError(err error) error {
	var te *json.UnmarshalTypeError
	if errors.As(err, &te) {
		field, _, _ := strings.Cut(te.Field, ".")
		return wire.BadRequest(field, "wrong type: "+te.Value)
	}
	if strings.Contains(err.Error(), "base64") {
		return wire.BadRequest("stdin_b64", "not valid base64")
	}
	return wire.BadRequest("body", "not a JSON object")
}

// Check says what is wrong with a request.
func (r *Request) Check() error { return r.check() }

func (r *Request) check() error {
	if !ValidID(r.ID) {
		return wire.BadRequest("id", "want 1 to 64 characters a-z, 0-9 and -, not beginning with -")
	}
	if r.login() {
		// The shell itself, in a terminal.
	} else if (r.Shell != nil) == (r.Argv != nil) {
		return wire.BadRequest("argv", "want exactly one of argv and shell")
	}
	if r.Shell != nil {
		if err := checkString("shell", *r.Shell); err != nil {
			return err
		}
	} else if !r.login() && (len(r.Argv) == 0 || r.Argv[0] == "") {
		return wire.BadRequest("argv", "the program's name is empty")
	}
	for _, a := range r.Argv {
		if err := checkString("argv", a); err != nil {
			return err
		}
	}
	if err := r.checkEnv(); err != nil {
		return err
	}
	if r.Cwd != "" && r.Cwd[0] != '/' || strings.IndexByte(r.Cwd, 0) >= 0 {
		return wire.BadRequest("cwd", "want an absolute path")
	}
	if r.TimeoutMS < 0 || r.TimeoutMS > math.MaxInt64/int64(time.Millisecond) {
		return wire.BadRequest("timeout_ms", "out of range")
	}
	if r.MaxOutput < 0 || r.MaxOutput > maxOutputLimit {
		return wire.BadRequest("max_output", "want 0 to 67108864")
	}
	if err := r.checkRlimits(); err != nil {
		return err
	}
	return r.checkInteractive()
}

func (r *Request) checkEnv() error {
	for k, v := range r.Env {
		if k == "" || strings.ContainsAny(k, "=\x00") {
			return wire.BadRequest("env", "a name is empty or contains = or NUL")
		}
		if strings.IndexByte(v, 0) >= 0 {
			return wire.BadRequest("env", "a value contains NUL")
		}
		if len(k)+len(v)+2 > maxString {
			return wire.TooLarge("env", "one variable is over the limit of 131072 bytes")
		}
	}
	return nil
}

func checkString(field, s string) error {
	if strings.IndexByte(s, 0) >= 0 {
		return wire.BadRequest(field, "contains NUL")
	}
	if len(s)+1 > maxString {
		return wire.TooLarge(field, "one argument is over the limit of 131072 bytes")
	}
	return nil
}

// ValidID checks the name of a command.
func ValidID(s string) bool {
	if s == "" || len(s) > 64 || s[0] == '-' {
		return false
	}
	for i := range len(s) {
		c := s[i]
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return true
}
