package services

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"time"

	"cloche.dev/agent/internal/proc"
	"cloche.dev/agent/internal/wire"
)

// commandID is a fresh id of a command.
func commandID(name, kind string) string {
	var b [4]byte
	_, _ = rand.Read(b[:])
	return kind + "-" + name + "-" + hex.EncodeToString(b[:])
}

// supervise keeps a service running until ctx is over, or it is not to be
// started any more.
func (m *Manager) supervise(ctx context.Context, s *service, r *running) {
	final, detail := m.runs(ctx, s, r)
	m.set(s, func() {
		s.state, s.detail, s.pid, s.waiting, s.again, s.run = final, detail, 0, nil, time.Time{}, nil
	})
	close(r.done)
}

// runs is all runs of a service; what is answered is its last state.
func (m *Manager) runs(ctx context.Context, s *service, r *running) (state, detail string) {
	var recent []time.Time
	for {
		if !m.awaitDependencies(ctx, s, r) {
			return stateStopped, ""
		}
		end := m.once(ctx, s, r)
		if ctx.Err() != nil || m.halted() {
			if end.process != "" {
				end.why = "it was stopped"
				m.set(s, func() { m.reportEnd(s, end, 0) })
			}
			return stateStopped, ""
		}
		switch {
		case r.spec.Restart == always, r.spec.Restart == onFailure && end.failed:
		case end.failed:
			return m.giveUp(s, end, end.why)
		default:
			m.set(s, func() { m.reportEnd(s, end, 0) })
			return stateStopped, ""
		}
		now := time.Now()
		for len(recent) > 0 && now.Sub(recent[0]) > millis(r.spec.WindowMS) {
			recent = recent[1:]
		}
		if most := *r.spec.MaxRestarts; most > 0 && len(recent) >= most {
			return m.giveUp(s, end, "it was started again as often as max_restarts allows in its window; last: "+end.why)
		}
		delay := backoff(r.spec, len(recent))
		if len(recent) < 1024 {
			recent = append(recent, now)
		}
		m.set(s, func() {
			r.drain()
			s.state, s.detail, s.pid, s.again = stateBackoff, end.why, 0, now.Add(delay)
			m.reportEnd(s, end, delay)
		})
		if !r.sleep(ctx, delay) {
			return stateStopped, ""
		}
		m.set(s, func() { s.restarts++ })
	}
}

// giveUp tells that a service is not started again, and why.
func (m *Manager) giveUp(s *service, end outcome, why string) (state, detail string) {
	m.set(s, func() {
		m.reportEnd(s, end, 0)
		m.report(s, toldGaveUp, Event{Detail: why})
	})
	return stateFailed, why
}

// drain forgets a start that was asked for while it ran: it ends no back-off.
func (r *running) drain() {
	select {
	case <-r.kick:
	default:
	}
}

// backoff doubles with each restart in the window.
func backoff(s *Spec, restarts int) time.Duration {
	d := millis(s.BackoffMS)
	for range min(restarts, 40) {
		if d *= 2; d >= millis(s.MaxBackoffMS) {
			break
		}
	}
	return min(d, millis(s.MaxBackoffMS))
}

// sleep ends early when somebody wants the service at once; false: it is over.
func (r *running) sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-r.kick:
	case <-ctx.Done():
		return false
	}
	return ctx.Err() == nil
}

// awaitDependencies waits until all of them are well, or have done their work.
func (m *Manager) awaitDependencies(ctx context.Context, s *service, r *running) bool {
	for {
		m.mu.Lock()
		changed := m.changes()
		missing := m.missing(r.spec)
		if len(missing) == 0 {
			m.mu.Unlock()
			return ctx.Err() == nil
		}
		s.state, s.detail, s.pid, s.waiting, s.again = stateStarting, "", 0, missing, time.Time{}
		m.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// once is one run.
func (m *Manager) once(ctx context.Context, s *service, r *running) outcome {
	req := r.spec.request(commandID(s.name, "svc"))
	req.Log = s.log
	e, err := m.Procs.Start(ctx, req)
	if err != nil {
		if ctx.Err() != nil {
			return outcome{}
		}
		told := wire.FromErr(err, "")
		return outcome{failed: true, why: "it could not be started: " + told.Field + ": " + told.Message}
	}
	began := e.Began()
	m.set(s, func() {
		s.state, s.detail, s.waiting, s.again = stateStarting, "", nil, time.Time{}
		s.pid, s.process, s.started, s.failures = began.PID, e.ID(), began.StartedNS, 0
		if r.spec.Health == nil && began.PID != 0 {
			s.state = stateHealthy
		}
		m.report(s, toldStarted, Event{PID: s.pid, Process: s.process})
	})
	unwell := m.watch(ctx, s, r, e)
	if unwell != "" || ctx.Err() != nil {
		signal, _ := wire.SignalNumber(r.spec.StopSignal)
		e.End(signal, millis(*r.spec.StopGraceMS))
	}
	<-e.Done()
	x := e.Exit()
	m.set(s, func() { s.pid, s.last, s.lastAt = 0, x, time.Now() })
	if unwell != "" {
		return outcome{true, unwell, e.ID(), x}
	}
	return outcome{x.ExitCode != 0, ending(x), e.ID(), x}
}

// ending says how a run has ended.
func ending(x *wire.Exit) string {
	switch {
	case x.Reason == wire.ReasonOOM:
		return "out of memory"
	case x.Detail != "" && (x.ExitCode == 126 || x.ExitCode == 127):
		return "the program could not be executed"
	case x.Signal != "":
		return "ended by " + x.Signal
	}
	return "ended with exit code " + itoa(x.ExitCode)
}

// watch returns when the command has ended, ctx is over, or the service has to
// be started again because it is not well: then it says why.
func (m *Manager) watch(ctx context.Context, s *service, r *running, e *proc.Exec) string {
	h := r.spec.Health
	if h == nil {
		select {
		case <-e.Done():
		case <-ctx.Done():
		}
		return ""
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	p := &pulse{h: h, began: time.Now()}
	timer := time.NewTimer(min(p.next(), eager/10))
	defer timer.Stop()
	answers := make(chan string, 1)
	for {
		select {
		case <-e.Done():
			return ""
		case <-ctx.Done():
			return ""
		case <-timer.C:
			go func() { answers <- m.ask(ctx, r.spec) }()
		case why := <-answers:
			if why != skipped && m.heard(s, p, why) && h.OnUnhealthy == restart && r.spec.Restart != never {
				return "not healthy: " + why
			}
			timer.Reset(p.next())
		}
	}
}

// skipped is the answer of a check that says nothing.
const skipped = "skipped"

// ask makes a check. One that met a hold of the machine tells nothing of a
// service that stood still in it.
func (m *Manager) ask(ctx context.Context, s *Spec) string {
	before, _ := m.Procs.Holds()
	why := ask(ctx, m.Procs, s)
	after, held := m.Procs.Holds()
	if why != "" && (before != after || held) {
		return skipped
	}
	return why
}

// heard keeps the result of a check; true: it is unhealthy from now on.
func (m *Manager) heard(s *service, p *pulse, why string) bool {
	news, well := p.add(why != "")
	m.set(s, func() {
		s.failures = p.failures
		switch {
		case !well && (p.failures > 0 || s.state == stateStarting):
			s.detail = why
		case well:
			s.detail = ""
		}
		if news && well {
			s.state = stateHealthy
			m.report(s, toldHealthy, Event{PID: s.pid, Process: s.process})
		} else if news {
			s.state = stateUnhealthy
			m.report(s, toldUnhealthy, Event{PID: s.pid, Process: s.process, Detail: why})
		}
	})
	return news && !well
}
