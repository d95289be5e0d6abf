package proc

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"cloche.dev/agent/internal/cgroup"
	"cloche.dev/agent/internal/wire"
)

// Exec is one command from its start to its end.
type Exec struct {
	id      string
	detach  bool
	request *Request
	m       *Manager
	pid     atomic.Int64
	began   time.Time
	rec     *record // of a detached command
	in      *input  // of a command that has one; set before it runs
	signals sync.Mutex
	group   *cgroup.Group // while it is this command's; signals guards it
	readers audience
	done    chan struct{} // closed when it has ended
	forget  bool          // nothing of it is to be remembered; the manager's lock guards it
	quiet   bool          // it is the agent's own: neither told nor remembered
	exit    *wire.Exit    // how it ended; set before done is closed
	tag     string

	attached context.Context // the request, of a command that is not detached
	kept     bool            // although the session is lost; the manager's lock guards it
	hangsUp  bool            // instead of being killed

	killOnce sync.Once
	kill     chan struct{} // closed when the command must die
	reason   string        // why; set before kill is closed
}

func newExec(m *Manager, r *Request) *Exec {
	e := &Exec{id: r.ID, detach: r.Detach, request: r, m: m, kill: make(chan struct{}), began: time.Now()}
	e.done, e.tag, e.hangsUp = make(chan struct{}), r.Tag, r.OnLost == "hangup"
	e.readers = audience{limit: time.Duration(r.LingerMS) * time.Millisecond, end: e.hangUp}
	if r.Detach {
		e.rec = m.newRecord(r.RecordBytes)
	}
	return e
}

// stop asks for the end of the whole tree. The first reason counts.
func (e *Exec) stop(reason string) {
	e.killOnce.Do(func() {
		e.reason = reason
		close(e.kill)
	})
}

// run is a command that has been started.
type run struct {
	e     *Exec
	cg    *cgroup.Group
	std   *pipes
	ended <-chan Ended
	out   *limited
	pumps []*pump
}

// start forks. On failure nothing is left behind. A program that cannot be
// executed is no error here: then there is a failed exit event.
func (e *Exec) start(p *plan) (r *run, failed *wire.Exit, err error) {
	m := e.m
	if p.failure != "" {
		return nil, e.notStarted(127, e.name()+": "+p.failure), nil
	}
	std, err := m.openPipes(e.request, p.id)
	if err != nil {
		return nil, nil, wire.FromErr(err, "")
	}
	m.mu.Lock()
	e.in = std.input(e.request)
	m.mu.Unlock()
	cg, err := m.acquire()
	if err != nil {
		std.closeChild()
		std.closeOurs()
		return nil, nil, wire.FromErr(err, "")
	}
	p.rlimits = e.request.limits()
	pid, ended, err := m.fork(p, std, cg)
	if cg != nil && errors.Is(err, syscall.ENODEV) {
		// User code has removed the group that was waiting for use.
		m.Cgroups.Drop(cg)
		if cg, err = m.acquire(); err == nil {
			pid, ended, err = m.fork(p, std, cg)
		}
	}
	std.closeChild()
	if err != nil {
		std.closeOurs()
		m.release(cg)
		code, detail, answer := startFailure(err, p.path, e.request)
		if answer != nil {
			return nil, nil, answer
		}
		return nil, e.notStarted(code, detail), nil
	}
	e.pid.Store(int64(pid))
	e.hold(cg)
	return &run{e: e, cg: cg, std: std, ended: ended}, nil, nil
}

func (e *Exec) name() string {
	if e.request.Shell != nil || e.request.login() {
		return "shell"
	}
	return strconv.Quote(e.request.Argv[0])
}

func (e *Exec) notStarted(code int, detail string) *wire.Exit {
	return &wire.Exit{ExitCode: code, Reason: wire.ReasonExited, Detail: detail}
}

func (e *Exec) startedEvent() wire.Started {
	return wire.Started{PID: int(e.pid.Load()), StartedNS: e.began.UnixNano()}
}

// sayFailed writes to stderr why a command never ran.
func (e *Exec) sayFailed(x *wire.Exit, out recorder) {
	text := x.Detail + "\n"
	x.DurationMS = millis(time.Since(e.began))
	x.StderrBytes = int64(len(text))
	framed := make([]byte, wire.HeaderSize+len(text))
	copy(framed[wire.HeaderSize:], text)
	_ = out.write(wire.TypeStderr, framed)
}

// attach connects the pipes with the output and starts to move bytes.
func (r *run) attach(out recorder) {
	req := r.e.request
	var onLimit func()
	if req.KillOnLimit {
		onLimit = func() { r.e.stop(wire.ReasonOutputLimit) }
	}
	r.out = &limited{next: out}
	r.out.lim[wire.TypeStdout] = newLimiter(req.MaxOutput, onLimit)
	r.out.lim[wire.TypeStderr] = newLimiter(req.MaxOutput, onLimit)
	r.pumps = append(r.pumps, newPump(r.std.stdout, wire.TypeStdout, r.out, r.e.m.nullOut))
	r.pumps[0].tty = r.std.tty
	if r.std.stderr != nil {
		r.pumps = append(r.pumps, newPump(r.std.stderr, wire.TypeStderr, r.out, r.e.m.nullOut))
	}
	for _, p := range r.pumps {
		go p.run()
	}
	if r.std.stdin != nil {
		go r.feed(req.Stdin)
	}
}

// feed writes the input. A command that does not read it, or ends early, ends
// this as well.
func (r *run) feed(input []byte) {
	_, _ = r.std.stdin.Write(input)
	_ = r.std.stdin.Close()
}

// wait sees the command to its end and makes the exit event.
func (r *run) wait(ctx context.Context) wire.Exit {
	end, killed := r.waitLeader(ctx)
	took := time.Since(r.e.began)
	if r.e.request.Sweep {
		r.sweep()
	}
	if r.std.stdin != nil {
		_ = r.std.stdin.SetWriteDeadline(time.Unix(1, 0))
	}
	if r.e.in != nil {
		r.e.in.close()
	}
	r.e.readers.stop()
	for _, p := range r.pumps {
		p.leaderExited()
	}
	for _, p := range r.pumps {
		<-p.done
	}
	if !killed && r.e.request.KillOnLimit && r.out.exceeded() {
		// The leader was faster than the news of its last words.
		r.killTree()
		killed = true
	}
	r.out.finish()
	return r.exitEvent(end, took, killed)
}

// waitLeader says how the leader ended and whether we killed it.
func (r *run) waitLeader(ctx context.Context) (Ended, bool) {
	e := r.e
	var timeout <-chan time.Time
	if ms := e.request.TimeoutMS; ms > 0 {
		t := time.NewTimer(time.Duration(ms)*time.Millisecond - time.Since(e.began))
		defer t.Stop()
		timeout = t.C
	}
	over := ctx.Done()
	for {
		select {
		case end := <-r.ended:
			return end, false
		case <-over:
			over = e.m.requestOver(e)
		case <-timeout:
			e.stop(wire.ReasonTimeout)
		case <-e.kill:
			return r.killLeader(), true
		}
	}
}

func (r *run) killLeader() Ended {
	r.killTree()
	select {
	case end := <-r.ended:
		return end
	case <-time.After(escapeDelay):
		// Root may have moved it out of its group.
		killDescendants(int(r.e.pid.Load()))
	}
	return <-r.ended
}

// escapeDelay is how long a killed leader may take before it is looked for
// outside its group.
const escapeDelay = time.Second

func (r *run) killTree() {
	if r.cg == nil || r.cg.Kill() != nil {
		killDescendants(int(r.e.pid.Load()))
	}
}

func (r *run) exitEvent(end Ended, took time.Duration, killed bool) wire.Exit {
	x := wire.Exit{
		Reason:     wire.ReasonExited,
		DurationMS: millis(took),
		UserMS:     millis(time.Duration(end.Usage.Utime.Nano())),
		SystemMS:   millis(time.Duration(end.Usage.Stime.Nano())),
		MaxRSSKB:   end.Usage.Maxrss,
	}
	for stream, l := range r.out.lim[1:] {
		l.mu.Lock()
		if stream == 0 {
			x.StdoutBytes, x.StdoutDropped = l.total, l.dropped
		} else {
			x.StderrBytes, x.StderrDropped = l.total, l.dropped
		}
		l.mu.Unlock()
	}
	if end.Status.Signaled() {
		s := end.Status.Signal()
		x.Reason, x.ExitCode = wire.ReasonSignaled, 128+int(s)
		x.Signal, x.SignalNumber = wire.SignalName(s), int(s)
	} else {
		x.ExitCode = end.Status.ExitStatus()
	}
	if r.cg != nil {
		x.OOMKills = r.cg.OOMKills()
	}
	r.explain(&x, end, killed)
	return x
}

// explain finds the reason behind a status that is not 0.
func (r *run) explain(x *wire.Exit, end Ended, killed bool) {
	if killed {
		x.Reason = r.e.reason
		switch {
		case x.Reason == wire.ReasonTimeout:
			x.ExitCode = 128 + int(syscall.SIGKILL)
			x.Detail = "the time limit of " + strconv.FormatInt(r.e.request.TimeoutMS, 10) + " ms was reached"
		case x.Reason == wire.ReasonOutputLimit:
			x.Detail = "a stream exceeded " + strconv.FormatInt(r.e.request.MaxOutput, 10) + " bytes"
		}
		return
	}
	if x.ExitCode == 0 || x.OOMKills == 0 {
		return
	}
	x.Reason = wire.ReasonOOM
	if end.Status.Signaled() && end.Status.Signal() == syscall.SIGKILL {
		x.Detail = "out of memory: the kernel killed the command"
	} else {
		x.Detail = "out of memory: the kernel killed a process of the command"
	}
}

func millis(d time.Duration) float64 {
	return float64(d.Microseconds()) / 1000
}
