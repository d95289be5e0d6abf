package proc

import (
	"context"
	"net/http"
	"time"

	"cloche.dev/agent/internal/wire"
)

const (
	keepNewer   = 512              // a record goes when so many newer ones exist,
	keepFor     = 15 * time.Minute // or when it is so old,
	keepAtLeast = 16               // but so many always stay.
	// finishedBudget bounds the output of all finished commands together;
	// the oldest output goes first, its exit event stays.
	finishedBudget = 8 << 20
	keepIDs        = 1024
)

// finishedExec is a detached command that has ended.
type finishedExec struct {
	e    *Exec
	exit *wire.Exit
	at   time.Time
}

// Info describes a command.
type Info struct {
	ID        string     `json:"id"`
	PID       int        `json:"pid"`
	Running   bool       `json:"running"`
	StartedNS int64      `json:"started_ns"`
	Detach    bool       `json:"detach"`
	Exit      *wire.Exit `json:"exit,omitempty"`
	Offset    uint64     `json:"offset"`
	Stdin     string     `json:"stdin,omitempty"` // none, pipe, closed or pty
	PTY       *Size      `json:"pty,omitempty"`
	Tag       string     `json:"tag,omitempty"`
	*Extent
}

// Extent is how much output of a detached command there was, and from which
// offset on it is kept.
type Extent struct {
	First  uint64 `json:"first"`
	Stdout uint64 `json:"stdout"`
	Stderr uint64 `json:"stderr"`
}

func (m *Manager) register(e *Exec) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.running[e.id] != nil || m.recent[e.id] || m.find(e.id) != nil {
		return wire.Conflict("conflict", "exec_id", "a command with this id has been started already")
	}
	m.running[e.id] = e
	return nil
}

// forget is for a command that did not start; its id may be used again.
func (m *Manager) forget(e *Exec) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.running, e.id)
	close(e.done)
}

// ended moves a command from the running to the remembered ones.
func (m *Manager) ended(e *Exec, x *wire.Exit) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.running, e.id)
	e.request = nil // it may hold megabytes of input
	e.exit = x
	close(e.done)
	if e.rec != nil {
		e.rec.release()
	}
	if e.quiet {
		return
	}
	m.recent[e.id] = true
	m.order = append(m.order, e.id)
	if len(m.order) > keepIDs {
		delete(m.recent, m.order[0])
		m.order = m.order[1:]
	}
	if e.detach && !e.forget {
		m.finished = append(m.finished, &finishedExec{e: e, exit: x, at: time.Now()})
	}
	m.expire()
}

// expire applies the rules of retention. The lock is held.
func (m *Manager) expire() {
	now := time.Now()
	for len(m.finished) > keepAtLeast {
		if len(m.finished) <= keepNewer && now.Sub(m.finished[0].at) < keepFor {
			break
		}
		m.finished[0] = nil
		m.finished = m.finished[1:]
	}
	budget := finishedBudget
	for i := len(m.finished) - 1; i >= 0; i-- {
		rec := m.finished[i].e.rec
		size := rec.size()
		if size > budget {
			rec.shrink(budget)
			size = budget
		}
		budget -= size
	}
}

// find looks among the finished ones. The lock is held.
func (m *Manager) find(id string) *finishedExec {
	for _, f := range m.finished {
		if f.e.id == id {
			return f
		}
	}
	return nil
}

func notFound() error { return wire.NotFound("exec_id", "no such command") }

// List describes all running commands and the finished detached ones.
func (m *Manager) List() []Info {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.expire()
	out := make([]Info, 0, len(m.running)+len(m.finished))
	for _, f := range m.finished {
		out = append(out, f.e.info(f.exit))
	}
	for _, e := range m.running {
		if !e.quiet {
			out = append(out, e.info(nil))
		}
	}
	return out
}

// Running is the number of commands that run.
func (m *Manager) Running() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.running)
}

// Get describes one command.
func (m *Manager) Get(id string) (Info, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.expire()
	if e := m.running[id]; e != nil {
		return e.info(nil), nil
	}
	if f := m.find(id); f != nil {
		return f.e.info(f.exit), nil
	}
	return Info{}, notFound()
}

func (e *Exec) info(x *wire.Exit) Info {
	s := e.startedEvent()
	i := Info{ID: e.id, PID: s.PID, Running: x == nil, StartedNS: s.StartedNS, Detach: e.detach, Exit: x}
	if e.rec != nil {
		i.Offset = e.rec.offset(0)
		extent := e.rec.extent()
		i.Extent, i.Tag = &extent, e.tag
		i.Stdin, i.PTY = e.in.state()
		if x != nil && i.Stdin == "pipe" {
			i.Stdin = "closed"
		}
	}
	return i
}

// Kill ends a running command with all its processes. One that has ended is
// left alone, and what it left behind in the background too.
func (m *Manager) Kill(id string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if e := m.running[id]; e != nil {
		e.stop(wire.ReasonCancelled)
		return nil
	}
	if m.recent[id] || m.find(id) != nil {
		return nil
	}
	return notFound()
}

// Forget kills a command and keeps nothing of it. It returns when the command
// has ended, or at the end of ctx.
func (m *Manager) Forget(ctx context.Context, id string) error {
	m.mu.Lock()
	e := m.running[id]
	found := e != nil
	if found {
		e.forget = true
		e.stop(wire.ReasonCancelled)
	}
	for i, f := range m.finished {
		if f.e.id == id {
			m.finished = append(m.finished[:i:i], m.finished[i+1:]...)
			found = true
			break
		}
	}
	m.mu.Unlock()
	if !found {
		return notFound()
	}
	if e != nil {
		select {
		case <-e.done:
		case <-ctx.Done():
		}
	}
	return nil
}

// Wait is Get, but of a running command it waits for the end, at most so long.
func (m *Manager) Wait(ctx context.Context, id string, limit time.Duration) (Info, error) {
	m.mu.Lock()
	e := m.running[id]
	m.mu.Unlock()
	if e != nil {
		timer := time.NewTimer(limit)
		defer timer.Stop()
		select {
		case <-e.done:
		case <-timer.C:
		case <-ctx.Done():
		}
	}
	return m.Get(id)
}

// Output streams the recorded output of a detached command: of one stream, or
// with 0 of both.
func (m *Manager) Output(ctx context.Context, w http.ResponseWriter, id string, stream byte, from uint64) error {
	m.mu.Lock()
	m.expire()
	e := m.running[id]
	if f := m.find(id); e == nil && f != nil {
		e = f.e
	}
	m.mu.Unlock()
	switch {
	case e == nil:
		return notFound()
	case e.rec == nil:
		return wire.Conflict("conflict", "exec_id", "the output of this command is not recorded")
	case from > e.rec.offset(stream):
		return wire.BadRequest("from", "there is no output at this offset yet")
	}
	return m.follow(ctx, w, e, stream, from)
}
