package proc

import (
	"maps"
	"math"
	"slices"
	"syscall"
	"time"

	"cloche.dev/agent/internal/wire"
)

// Size is that of a terminal, in characters.
type Size struct {
	Cols int `json:"cols"`
	Rows int `json:"rows"`
}

const (
	maxSize = 1000 // columns or rows
	// minRecord and maxRecord bound how much output of one command is kept.
	minRecord = 4 << 10
	maxRecord = 16 << 20
	// maxTag bounds what the host wants to be told of a command later.
	maxTag = 2 << 10
)

// Check says which of the two is not possible.
func (s Size) Check() error {
	if s.Cols < 1 || s.Cols > maxSize {
		return wire.BadRequest("cols", "want 1 to 1000")
	}
	if s.Rows < 1 || s.Rows > maxSize {
		return wire.BadRequest("rows", "want 1 to 1000")
	}
	return nil
}

// login says whether the user's shell itself is wanted, in a terminal.
func (r *Request) login() bool { return r.PTY != nil && r.Argv == nil && r.Shell == nil }

// checkInteractive is about the input, and what only a detached or only an
// attached command may have.
func (r *Request) checkInteractive() error {
	switch r.StdinMode {
	case "", "none", "pipe":
	default:
		return wire.BadRequest("stdin", "want none or pipe")
	}
	if r.PTY != nil {
		if err := r.PTY.Check(); err != nil {
			return err
		}
		if r.StdinMode == "pipe" || r.Stdin != nil {
			return wire.BadRequest("stdin", "a terminal is its own input")
		}
	}
	if r.StdinMode == "pipe" && r.Stdin != nil {
		return wire.BadRequest("stdin", "want one of stdin and stdin_b64")
	}
	if !r.Detach {
		return r.checkAttached()
	}
	if r.OnLost != "" {
		return wire.BadRequest("on_lost", "only an attached command may have it")
	}
	if r.RecordBytes != 0 && (r.RecordBytes < minRecord || r.RecordBytes > maxRecord) {
		return wire.BadRequest("record_bytes", "want 4096 to 16777216")
	}
	if r.LingerMS < 0 || r.LingerMS > math.MaxInt64/int64(time.Millisecond) {
		return wire.BadRequest("linger_ms", "out of range")
	}
	if len(r.Tag) > maxTag {
		return wire.BadRequest("tag", "longer than 2048 bytes")
	}
	return nil
}

func (r *Request) checkAttached() error {
	for _, f := range []struct {
		name string
		set  bool
	}{
		{"record_bytes", r.RecordBytes != 0}, {"linger_ms", r.LingerMS != 0}, {"tag", r.Tag != ""},
	} {
		if f.set {
			return wire.BadRequest(f.name, "only a detached command may have it")
		}
	}
	switch r.OnLost {
	case "", "kill", "hangup":
		return nil
	}
	return wire.BadRequest("on_lost", "want kill or hangup")
}

// resources are the limits that a command may be given, by their names.
var resources = map[string]int{
	"cpu": 0, "fsize": 1, "data": 2, "stack": 3, "core": 4, "nproc": 6, "nofile": 7, "memlock": 8, "as": 9,
}

func (r *Request) checkRlimits() error {
	for name, v := range r.Rlimits {
		if _, ok := resources[name]; !ok {
			return wire.BadRequest("rlimits", "want cpu, fsize, data, stack, core, nproc, nofile, memlock or as")
		}
		if v < -1 || name == "nofile" && (v < 3 || v > 1<<20) {
			return wire.BadRequest("rlimits", "a limit is out of range")
		}
	}
	return nil
}

// rlimit is one resource limit of a command.
type rlimit struct {
	resource int
	value    syscall.Rlimit
}

func (r *Request) limits() []rlimit {
	var out []rlimit
	for _, name := range slices.Sorted(maps.Keys(r.Rlimits)) {
		v := uint64(r.Rlimits[name]) // -1, no limit, is what it is for the kernel
		out = append(out, rlimit{resources[name], syscall.Rlimit{Cur: v, Max: v}})
	}
	return out
}
