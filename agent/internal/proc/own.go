package proc

import (
	"context"
	"net/http"
	"syscall"
	"time"

	"cloche.dev/agent/internal/wire"
)

// This file is for commands that the agent starts by itself: those of services,
// and what asks after their health.

// Start starts a detached command that nobody follows yet. It waits through a
// hold, at most until ctx is over.
func (m *Manager) Start(ctx context.Context, req *Request) (*Exec, error) {
	if err := req.check(); err != nil {
		return nil, err
	}
	return m.background(ctx, req)
}

// ID is what the command is called.
func (e *Exec) ID() string { return e.id }

// Began says how the command was started. Its process is 0 when there was
// nothing to execute.
func (e *Exec) Began() wire.Started { return e.startedEvent() }

// Done is closed when the command has ended.
func (e *Exec) Done() <-chan struct{} { return e.done }

// Exit says how a command has ended that is done.
func (e *Exec) Exit() *wire.Exit { return e.exit }

// End asks all processes of the command to end, with a signal, and kills them
// when they have not done so in time.
func (e *Exec) End(signal syscall.Signal, grace time.Duration) {
	_ = e.signalTree(signal)
	_ = e.signalTree(syscall.SIGCONT)
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-e.done:
		return
	case <-timer.C:
	}
	e.stop(wire.ReasonCancelled)
	<-e.done
}

// sweep ends what a leader that has ended has left behind.
func (r *run) sweep() {
	if r.cg != nil && r.cg.Kill() == nil {
		return
	}
	leader := int(r.e.pid.Load())
	for pid, s := range processes() {
		if s.session == leader {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}

type quietKey struct{}

func isQuiet(ctx context.Context) bool { return ctx.Value(quietKey{}) != nil }

// Probe runs a command to its end, or to that of ctx, and throws its output
// away. No list shows it and its name is free again afterwards.
func (m *Manager) Probe(ctx context.Context, req *Request) (*wire.Exit, error) {
	if err := req.check(); err != nil {
		return nil, err
	}
	p, err := m.plan(req)
	if err != nil {
		return nil, err
	}
	ctx = context.WithValue(ctx, quietKey{}, true)
	if err := m.enter(ctx); err != nil {
		return nil, err
	}
	e, r, failed, err := m.launch(ctx, req, p)
	if err != nil {
		return nil, err
	}
	e.finish(ctx, r, failed, nowhere{})
	return e.exit, nil
}

// Holds counts the holds so far, and says whether one goes on: what was
// measured of commands meanwhile says nothing about them.
func (m *Manager) Holds() (uint64, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.holds, m.held != nil
}

// Log keeps the newest output of commands that follow one another.
type Log struct {
	m   *Manager
	rec *record
}

// NewLog makes a log of at most so many bytes. Close must follow.
func (m *Manager) NewLog(limit int) *Log {
	l := &Log{m, m.newRecord(limit)}
	l.rec.begin(wire.Started{StartedNS: time.Now().UnixNano()})
	return l
}

// Resize gives the log another limit.
func (l *Log) Resize(limit int) {
	l.rec.mu.Lock()
	defer l.rec.mu.Unlock()
	before := l.rec.cost
	l.rec.limit = limit
	l.rec.account(before)
}

// Close ends the log for those who follow it.
func (l *Log) Close() {
	l.rec.release()
	_ = l.rec.exit(wire.Exit{Reason: wire.ReasonExited})
}

// Extent says what of the log is kept, and how much there was.
func (l *Log) Extent() (first, next uint64) {
	l.rec.mu.Lock()
	defer l.rec.mu.Unlock()
	return l.rec.first, l.rec.next
}

// Follow streams the log: one stream of it, or with 0 both.
func (l *Log) Follow(ctx context.Context, w http.ResponseWriter, stream byte, from uint64) error {
	if from > l.rec.offset(stream) {
		return wire.BadRequest("from", "there is no output at this offset yet")
	}
	out := newFrameWriter(w)
	defer out.close()
	f := follower{rec: l.rec, out: out, stream: stream, pos: from}
	_ = f.follow(ctx)
	return nil
}

// both writes to the record of a command and to a log, which outlives it.
type both struct{ own, log *record }

func (b both) write(stream byte, framed []byte) error {
	_ = b.log.write(stream, framed)
	return b.own.write(stream, framed)
}

func (b both) gap(stream byte, n int64) error {
	_ = b.log.gap(stream, n)
	return b.own.gap(stream, n)
}

func (b both) flush() {}

func (b both) exit(x wire.Exit) error { return b.own.exit(x) }
