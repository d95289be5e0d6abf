package proc

import (
	"context"
	"errors"
	"testing"
	"time"

	"cloche.dev/agent/internal/wire"
)

func manager(t *testing.T) *Manager {
	t.Helper()
	m, err := NewManager(&Manager{})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// attached registers a command that is only pretended to run.
func attached(t *testing.T, m *Manager, id string) (*Exec, context.CancelCauseFunc) {
	t.Helper()
	session, end := context.WithCancelCause(context.Background())
	request, cancel := context.WithCancel(session)
	t.Cleanup(cancel)
	e := newExec(m, &Request{ID: id})
	e.attached = request
	if err := m.register(e); err != nil {
		t.Fatal(err)
	}
	return e, end
}

func (e *Exec) stopped() bool {
	select {
	case <-e.kill:
		return true
	default:
		return false
	}
}

// TestVerdictIsForALostSession asks about commands whose goroutines come late.
func TestVerdictIsForALostSession(t *testing.T) {
	m := manager(t)
	early, endEarly := attached(t, m, "early")
	endEarly(wire.ErrSessionLost)
	during, endDuring := attached(t, m, "during")
	reset, endReset := attached(t, m, "reset")
	fine, endFine := attached(t, m, "fine")
	if err := m.Freeze(time.Second); err != nil {
		t.Fatal(err)
	}
	if m.Freeze(time.Second) == nil {
		t.Error("frozen twice")
	}
	endDuring(wire.ErrSessionLost)
	endReset(nil)
	if wait := m.requestOver(during); wait == nil || during.stopped() {
		t.Error("it does not wait")
	}
	if m.requestOver(reset) != nil || !reset.stopped() {
		t.Error("a request that was taken back waits")
	}
	if err := m.Thaw(true); err != nil {
		t.Error(err)
	}
	if !early.stopped() || m.requestOver(during) != nil || during.stopped() || fine.stopped() {
		t.Error("the wrong ones are kept")
	}
	_ = m.Freeze(time.Second)
	endFine(wire.ErrSessionLost)
	_ = m.Thaw(false)
	if !fine.stopped() || during.stopped() {
		t.Error("the wrong ones are cancelled")
	}
}

func TestFreezeWaitsForStarts(t *testing.T) {
	m := manager(t)
	ctx, cancel := context.WithCancel(context.Background())
	if err := m.enter(ctx); err != nil {
		t.Fatal(err)
	}
	var e *wire.Error
	if err := m.Freeze(20 * time.Millisecond); !errors.As(err, &e) || e.Status != 503 {
		t.Errorf("got %v", err)
	}
	frozen := make(chan error)
	go func() { frozen <- m.Freeze(10 * time.Second) }()
	time.Sleep(20 * time.Millisecond)
	m.leave()
	if err := <-frozen; err != nil {
		t.Error(err)
	}
	entered := make(chan error)
	go func() { entered <- m.enter(ctx) }()
	select {
	case <-entered:
		t.Error("a command starts in a hold")
	case <-time.After(20 * time.Millisecond):
	}
	cancel()
	if <-entered == nil {
		t.Error("a request that is over starts")
	}
	_ = m.Thaw(false)
	if m.starting != 0 {
		t.Errorf("%d start", m.starting)
	}
}
