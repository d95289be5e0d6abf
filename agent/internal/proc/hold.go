package proc

import (
	"context"
	"errors"
	"os"
	"syscall"
	"time"

	"cloche.dev/agent/internal/sys"
	"cloche.dev/agent/internal/wire"
)

// Freeze begins a hold, which lasts until Thaw: every command stands still, if
// there are cgroups, and none is started. An attached command whose session is
// lost meanwhile is not cancelled but waits for what Thaw says. After an error
// everything is as it was.
func (m *Manager) Freeze(limit time.Duration) error {
	deadline := time.Now().Add(limit)
	m.mu.Lock()
	if m.held != nil {
		m.mu.Unlock()
		return wire.Conflict("conflict", "", "the commands are frozen already")
	}
	m.held = make(chan struct{})
	m.holds++
	// What was lost before does not wait, even if its goroutine has not run.
	m.judge(false)
	m.mu.Unlock()
	err := m.freeze(deadline)
	if err != nil {
		_ = m.Thaw(false)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return wire.Exhausted("the commands could not be frozen in time")
	}
	return err
}

func (m *Manager) freeze(deadline time.Time) error {
	// Whoever forks waits for the exec of the child: one that is frozen in
	// between would hold up the agent itself.
	if !sys.Await(deadline, m.noneStarts) {
		return os.ErrDeadlineExceeded
	}
	if m.Cgroups == nil {
		return nil
	}
	if err := m.Cgroups.Freeze(deadline); !noCgroups(err) {
		return err
	}
	return nil
}

// Thaw ends a hold; without one it does nothing. A command whose session was
// lost in it goes on with keep, and is cancelled otherwise.
func (m *Manager) Thaw(keep bool) error {
	m.mu.Lock()
	if m.held == nil {
		m.mu.Unlock()
		return nil
	}
	m.judge(keep)
	m.mu.Unlock()
	var err error
	if m.Cgroups != nil {
		if err = m.Cgroups.Thaw(); noCgroups(err) {
			err = nil
		}
	}
	// Only now: what starts in a frozen group is born frozen.
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.held != nil {
		close(m.held)
		m.held = nil
	}
	return err
}

// judge decides about the attached commands whose session is lost. It looks at
// the session itself and does not rely on who waits for it: such a goroutine
// may run long after a thaw. The lock is held.
func (m *Manager) judge(keep bool) {
	for _, e := range m.running {
		switch {
		case e.kept || !e.lost():
		case keep:
			e.keep()
		default:
			e.stop(wire.ReasonCancelled)
		}
	}
}

// lost says whether the session that the command is attached to has ended. A
// request that the host has taken back is something else.
func (e *Exec) lost() bool {
	return e.attached != nil && errors.Is(context.Cause(e.attached), wire.ErrSessionLost)
}

// keep lets a command go on without a reader; one that is to be told so is. The
// manager's lock is held.
func (e *Exec) keep() {
	e.kept = true
	if e.hangsUp {
		go e.letGo(e.in)
	}
}

// letGo tells a command that nobody is at the other end of its line any more,
// as the kernel does when a terminal goes: whoever wants to outlive it ignores
// the signal.
func (e *Exec) letGo(in *input) {
	if in != nil {
		in.close()
	}
	if e.signal(syscall.SIGHUP, true) == nil {
		_ = e.signal(syscall.SIGCONT, true)
	}
}

// requestOver cancels a command whose request is over, unless the command is
// kept. If that is not decided yet, it gives a channel that is closed when it
// is.
func (m *Manager) requestOver(e *Exec) <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case e.kept:
		return nil
	case m.held != nil && e.lost():
		return m.held
	case e.hangsUp:
		e.keep()
		return nil
	}
	e.stop(wire.ReasonCancelled)
	return nil
}

// enter waits until a command may start; leave must follow. A request that
// came in a hold and whose session is lost is never carried out: its twin in
// the machine that this one is a copy of may have been.
func (m *Manager) enter(ctx context.Context) error {
	for {
		held := m.tryEnter()
		if held == nil {
			return nil
		}
		select {
		case <-held:
		case <-ctx.Done():
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
}

// tryEnter is enter, but in a hold it gives the channel that is closed at its
// end.
func (m *Manager) tryEnter() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.held == nil {
		m.starting++
	}
	return m.held
}

func (m *Manager) leave() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.starting--
}

func (m *Manager) noneStarts() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.starting == 0
}
