package machine

import (
	"context"
	"errors"
	"os"
	"syscall"
	"time"

	"cloche.dev/agent/internal/sys"
	"cloche.dev/agent/internal/wire"
)

// Commands is what the machine asks of those who run the commands.
type Commands interface {
	// Freeze makes them stand still, or fails and changes nothing.
	Freeze(limit time.Duration) error
	// Thaw lets them go on; keep says what becomes of those whose session
	// with the host was lost meanwhile. Without a freeze it does nothing.
	Thaw(keep bool) error
}

const (
	// freezeLimit is how long the commands may take to stand still.
	freezeLimit = 2 * time.Second

	fiFreeze = 0xC0045877
	fiThaw   = 0xC0045878
)

// Freeze is the body of POST /v1/freeze.
type Freeze struct {
	Disk      bool  `json:"disk"`
	TimeoutMS int64 `json:"timeout_ms"`
}

// Check refuses what is malformed.
func (f *Freeze) Check() error {
	if f.TimeoutMS < 100 || f.TimeoutMS > 60_000 {
		return wire.BadRequest("timeout_ms", "want 100 to 60000")
	}
	return nil
}

// Frozen is its answer: how many milliseconds each part took.
type Frozen struct {
	Steps steps `json:"steps"`
}

// frozen is the state between a freeze and its thaw.
type frozen struct {
	disk  bool
	timer *time.Timer
}

// Freeze makes the commands and the disk stand still, so that the host can copy
// the machine. It ends by itself after the time limit: the host may have died.
// The limit is counted by the monotonic clock, which does not run while the
// machine is stopped.
func (m *Machine) Freeze(ctx context.Context, r *Freeze) (*Frozen, error) {
	m.freezing.Lock()
	defer m.freezing.Unlock()
	if m.frozen != nil {
		return nil, wire.Conflict("conflict", "", "the machine is frozen already")
	}
	began := time.Now()
	limit := time.Duration(r.TimeoutMS) * time.Millisecond
	out := &Frozen{Steps: steps{}}
	if err := out.Steps.do("commands", func() error { return m.Commands.Freeze(min(limit, freezeLimit)) }); err != nil {
		return nil, err
	}
	f := &frozen{}
	m.frozen, m.expired = f, false
	if r.Disk && m.Real {
		if err := out.Steps.do("disk", f.freezeDisk); err != nil {
			_ = m.thaw(false)
			return nil, err
		}
	}
	left := limit - time.Since(began)
	if left <= 0 || ctx.Err() != nil {
		_ = m.thaw(false)
		return nil, wire.Exhausted("the machine could not be frozen in time")
	}
	f.timer = time.AfterFunc(left, func() { m.expire(f) })
	return out, nil
}

// expire thaws unless that has been done, and a new freeze begun even.
func (m *Machine) expire(f *frozen) {
	m.freezing.Lock()
	defer m.freezing.Unlock()
	if m.frozen == f {
		m.expired = true
		_ = m.thaw(false)
	}
}

// Thaw undoes Freeze.
func (m *Machine) Thaw(keep bool) error {
	m.freezing.Lock()
	defer m.freezing.Unlock()
	return m.thaw(keep)
}

// thaw is Thaw with the lock held.
func (m *Machine) thaw(keep bool) error {
	f := m.frozen
	if f == nil {
		return nil
	}
	m.frozen = nil
	if f.timer != nil {
		f.timer.Stop()
	}
	return errors.Join(f.thawDisk(), m.Commands.Thaw(keep))
}

func (f *frozen) freezeDisk() error {
	// Other file systems have something to write as well.
	syscall.Sync()
	err := rootIoctl(fiFreeze)
	if errors.Is(err, syscall.EBUSY) {
		// Somebody else has done it, and their thaw would not wait for us.
		return wire.Conflict("conflict", "disk", "the disk is frozen already")
	}
	if err != nil {
		return wire.FromErr(err, "disk")
	}
	f.disk = true
	return nil
}

func (f *frozen) thawDisk() error {
	if !f.disk {
		return nil
	}
	f.disk = false
	// EINVAL: it is thawed already.
	if err := rootIoctl(fiThaw); err != nil && !errors.Is(err, syscall.EINVAL) {
		return wire.FromErr(err, "disk")
	}
	return nil
}

func rootIoctl(request uintptr) error {
	root, err := os.Open("/")
	if err != nil {
		return err
	}
	defer root.Close()
	return sys.IoctlInt(int(root.Fd()), request, 0)
}

// steps are the parts of a call and how many milliseconds each took.
type steps map[string]float64

// do carries out one step.
func (s steps) do(name string, step func() error) error {
	start := time.Now()
	if err := step(); err != nil {
		return wire.FromErr(err, name)
	}
	s[name] = float64(time.Since(start).Microseconds()) / 1000
	return nil
}
