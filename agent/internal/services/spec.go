// Package services keeps named commands running: it starts them in order, asks
// after their health, and starts them again when they end.
package services

import (
	"encoding/json"
	"reflect"
	"strings"
	"time"

	"cloche.dev/agent/internal/proc"
	"cloche.dev/agent/internal/wire"
)

const (
	// maxServices bounds how many there are, and maxName their names, which
	// are part of the ids of their commands.
	maxServices = 32
	maxName     = 48
	maxSeconds  = 24 * 3600
	maxGrace    = 60
	maxPath     = 2048
	// runRecord is how much output of one run is kept beside the log.
	runRecord  = 64 << 10
	minLog     = 4 << 10
	maxLog     = 16 << 20
	defaultLog = 1 << 20
	// MaxSpec bounds a definition as JSON.
	MaxSpec = 128 << 10
)

// Policies of starting again, and what is done about a service that is not well.
const (
	never     = "no"
	onFailure = "on-failure"
	always    = "always"
	restart   = "restart"
	report    = "report"
)

// Spec defines a service.
type Spec struct {
	Name     string            `json:"name"`
	Argv     []string          `json:"argv,omitempty"`
	Shell    *string           `json:"shell,omitempty"`
	Env      map[string]string `json:"env,omitempty"`
	Cwd      string            `json:"cwd,omitempty"`
	User     string            `json:"user,omitempty"`
	Rlimits  map[string]int64  `json:"rlimits,omitempty"`
	LogBytes int               `json:"log_bytes"`
	Tag      string            `json:"tag,omitempty"`

	Autostart    *bool  `json:"autostart"`
	Restart      string `json:"restart"`
	BackoffMS    int64  `json:"backoff_ms"`
	MaxBackoffMS int64  `json:"max_backoff_ms"`
	MaxRestarts  *int   `json:"max_restarts"` // 0: no limit
	WindowMS     int64  `json:"window_ms"`

	StopSignal  string `json:"stop_signal"`
	StopGraceMS *int64 `json:"stop_grace_ms"`

	DependsOn []string `json:"depends_on,omitempty"`
	Health    *Health  `json:"health,omitempty"`
}

// Health is how to find out whether a service is well: exactly one of a port, a
// page and a command.
type Health struct {
	TCPPort     int      `json:"tcp_port,omitempty"`
	HTTP        *HTTP    `json:"http,omitempty"`
	Argv        []string `json:"argv,omitempty"`
	Shell       *string  `json:"shell,omitempty"`
	IntervalMS  int64    `json:"interval_ms"`
	TimeoutMS   int64    `json:"timeout_ms"`
	Retries     int      `json:"retries"`
	StartMS     *int64   `json:"start_ms"`
	OnUnhealthy string   `json:"on_unhealthy"`
}

// HTTP is a page that has to answer.
type HTTP struct {
	Port   int    `json:"port"`
	Path   string `json:"path"`
	Status int    `json:"status,omitempty"` // 0: any from 200 to 399
}

func fill[T comparable](p *T, v T) {
	var zero T
	if *p == zero {
		*p = v
	}
}

func pointer[T any](p **T, v T) {
	if *p == nil {
		*p = &v
	}
}

// complete puts in what was left out.
func (s *Spec) complete() {
	// What is empty is as it is read again from the disk.
	if len(s.Env) == 0 {
		s.Env = nil
	}
	if len(s.Rlimits) == 0 {
		s.Rlimits = nil
	}
	if len(s.DependsOn) == 0 {
		s.DependsOn = nil
	}
	fill(&s.LogBytes, defaultLog)
	pointer(&s.Autostart, true)
	fill(&s.Restart, onFailure)
	fill(&s.BackoffMS, 1000)
	fill(&s.MaxBackoffMS, max(30_000, s.BackoffMS))
	pointer(&s.MaxRestarts, 5)
	fill(&s.WindowMS, 300_000)
	fill(&s.StopSignal, "TERM")
	pointer(&s.StopGraceMS, 10_000)
	if h := s.Health; h != nil {
		fill(&h.IntervalMS, 10_000)
		fill(&h.TimeoutMS, 5000)
		fill(&h.Retries, 3)
		pointer(&h.StartMS, 30_000)
		fill(&h.OnUnhealthy, restart)
		if h.HTTP != nil {
			fill(&h.HTTP.Path, "/")
		}
	}
}

// ValidName checks the name of a service.
func ValidName(s string) bool { return len(s) <= maxName && proc.ValidID(s) }

// check completes a definition, and says what is wrong with it by itself.
func (s *Spec) check() error {
	s.complete()
	if !ValidName(s.Name) {
		return wire.BadRequest("name", "want 1 to 48 characters a-z, 0-9 and -, not beginning with -")
	}
	if err := s.request("check").Check(); err != nil {
		return err
	}
	if s.LogBytes < minLog || s.LogBytes > maxLog {
		return wire.BadRequest("log_bytes", "want 4096 to 16777216")
	}
	switch s.Restart {
	case never, onFailure, always:
	default:
		return wire.BadRequest("restart", "want no, on-failure or always")
	}
	if _, ok := wire.SignalNumber(s.StopSignal); !ok {
		return wire.BadRequest("stop_signal", "want the name of a signal, or a number from 1 to 64")
	}
	for _, n := range []struct {
		field     string
		value     int64
		low, high int64
	}{
		{"backoff_ms", s.BackoffMS, 1, maxSeconds * 1000},
		{"max_backoff_ms", s.MaxBackoffMS, s.BackoffMS, maxSeconds * 1000},
		{"max_restarts", int64(*s.MaxRestarts), 0, 1000},
		{"window_ms", s.WindowMS, 1, maxSeconds * 1000},
		{"stop_grace_ms", *s.StopGraceMS, 0, maxGrace * 1000},
	} {
		if n.value < n.low || n.value > n.high {
			return wire.BadRequest(n.field, "out of range")
		}
	}
	if len(s.DependsOn) >= maxServices {
		return wire.BadRequest("depends_on", "more services than there can be")
	}
	return s.Health.check(s)
}

func (h *Health) check(s *Spec) error {
	if h == nil {
		return nil
	}
	kinds := 0
	for _, there := range []bool{h.TCPPort != 0, h.HTTP != nil, h.Argv != nil || h.Shell != nil} {
		if there {
			kinds++
		}
	}
	bad := func(what string) error { return wire.BadRequest("health", what) }
	if kinds != 1 {
		return bad("want exactly one of tcp_port, http and a command")
	}
	if h.OnUnhealthy != restart && h.OnUnhealthy != report {
		return bad("on_unhealthy: want restart or report")
	}
	if h.IntervalMS < 10 || h.IntervalMS > maxSeconds*1000 || h.TimeoutMS < 10 || h.TimeoutMS > maxSeconds*1000 ||
		h.Retries < 1 || h.Retries > 1000 || *h.StartMS < 0 || *h.StartMS > maxSeconds*1000 {
		return bad("a number is out of range")
	}
	switch {
	case h.TCPPort != 0:
		return checkPort(h.TCPPort)
	case h.HTTP != nil:
		p := h.HTTP.Path
		if len(p) > maxPath || p[0] != '/' || strings.ContainsFunc(p, func(r rune) bool { return r <= ' ' || r >= 0x7f }) {
			return bad("http.path: want a path of printable ASCII that begins with /")
		}
		if h.HTTP.Status != 0 && (h.HTTP.Status < 100 || h.HTTP.Status > 599) {
			return bad("http.status: out of range")
		}
		return checkPort(h.HTTP.Port)
	}
	if s.probe("check").Check() != nil {
		return bad("the command is malformed")
	}
	return nil
}

func checkPort(n int) error {
	if n < 1 || n > 65535 {
		return wire.BadRequest("health", "want a port from 1 to 65535")
	}
	return nil
}

// request is the command of one run.
func (s *Spec) request(id string) *proc.Request {
	return &proc.Request{
		ID: id, Argv: s.Argv, Shell: s.Shell, Env: s.Env, Cwd: s.Cwd, User: s.User, Rlimits: s.Rlimits,
		Detach: true, RecordBytes: runRecord, Tag: s.Tag, Sweep: true,
	}
}

// probe is the command that asks after the health.
func (s *Spec) probe(id string) *proc.Request {
	return &proc.Request{
		ID: id, Argv: s.Health.Argv, Shell: s.Health.Shell, Env: s.Env, Cwd: s.Cwd, User: s.User, Sweep: true,
	}
}

func (s *Spec) same(other *Spec) bool { return reflect.DeepEqual(s, other) }

// Parse reads the definition of the service of this name.
func Parse(name string, b []byte) (*Spec, error) {
	var s Spec
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, proc.JSONError(err)
	}
	s.Name = name
	return &s, s.check()
}

func millis(ms int64) time.Duration { return time.Duration(ms) * time.Millisecond }
