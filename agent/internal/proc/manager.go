package proc

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"syscall"

	"cloche.dev/agent/internal/cgroup"
	"cloche.dev/agent/internal/users"
	"cloche.dev/agent/internal/wire"
)

// Manager starts commands and knows those that run or are remembered.
type Manager struct {
	Users       *users.DB
	Environment *users.Environment
	Reaper      *Reaper
	Cgroups     *cgroup.Manager // nil: none to be had

	nullIn, nullOut int
	self            int // this program, for commands with its tools

	mu       sync.Mutex
	running  map[string]*Exec
	finished []*finishedExec // detached ones, oldest first
	recent   map[string]bool // ids of commands that have ended
	order    []string        // the same, oldest first
	starting int             // commands between enter and leave
	held     chan struct{}   // of the present hold, closed at its end; or nil
	holds    uint64          // so many there were so far
	records  pool
}

// NewManager completes m, whose exported fields are set.
func NewManager(m *Manager) (*Manager, error) {
	var err error
	m.running = map[string]*Exec{}
	m.recent = map[string]bool{}
	if m.nullIn, m.nullOut, err = devNull(); err != nil {
		return m, err
	}
	m.self, err = syscall.Open("/proc/self/exe", syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	return m, err
}

// acquire gives no group and no error where there are no cgroups: in developer
// mode, or when root has unmounted them.
func (m *Manager) acquire() (*cgroup.Group, error) {
	if m.Cgroups == nil {
		return nil, nil
	}
	g, err := m.Cgroups.Acquire()
	if noCgroups(err) {
		return nil, nil
	}
	return g, err
}

func noCgroups(err error) bool {
	return errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.EROFS)
}

func (m *Manager) release(g *cgroup.Group) {
	if g != nil {
		m.Cgroups.Release(g)
	}
}

// Serve runs a command and answers with its frames.
func (m *Manager) Serve(ctx context.Context, w http.ResponseWriter, req *Request) error {
	if req.Detach {
		e, err := m.background(ctx, req)
		if err != nil {
			return err
		}
		return m.follow(ctx, w, e, 0, 0)
	}
	p, err := m.plan(req)
	if err != nil {
		return err
	}
	if err := m.enter(ctx); err != nil {
		return err
	}
	e, r, failed, err := m.launch(ctx, req, p)
	if err != nil {
		return err
	}
	out := newFrameWriter(w)
	defer out.close()
	_ = out.started(e.startedEvent())
	e.finish(ctx, r, failed, out)
	return nil
}

// background starts a detached command.
func (m *Manager) background(ctx context.Context, req *Request) (*Exec, error) {
	p, err := m.plan(req)
	if err != nil {
		return nil, err
	}
	if err := m.enter(ctx); err != nil {
		return nil, err
	}
	e, r, failed, err := m.launch(ctx, req, p)
	if err != nil {
		return nil, err
	}
	var out recorder = e.rec
	if req.Log != nil {
		out = both{e.rec, req.Log.rec}
	}
	e.rec.begin(e.startedEvent())
	go e.finish(context.Background(), r, failed, out)
	return e, nil
}

// launch registers and starts a command that has entered.
func (m *Manager) launch(ctx context.Context, req *Request, p *plan) (*Exec, *run, *wire.Exit, error) {
	defer m.leave()
	e := newExec(m, req)
	e.quiet = isQuiet(ctx)
	if !req.Detach {
		e.attached = ctx
	}
	if err := m.register(e); err != nil {
		if e.rec != nil {
			e.rec.release()
		}
		return nil, nil, nil, err
	}
	r, failed, err := e.start(p)
	if err != nil {
		m.forget(e)
		if e.rec != nil {
			e.rec.release()
		}
	}
	return e, r, failed, err
}

// finish sees a command to its end. Whoever has read the exit event finds the
// command among those that have ended.
func (e *Exec) finish(ctx context.Context, r *run, x *wire.Exit, out recorder) {
	if r == nil {
		e.sayFailed(x, out)
	} else {
		r.attach(out)
		exit := r.wait(ctx)
		x = &exit
		e.hold(nil)
		// Whether the group is empty now is no concern of the caller's.
		defer func() { go e.m.release(r.cg) }()
	}
	e.m.ended(e, x)
	_ = out.exit(*x)
}

func (m *Manager) follow(ctx context.Context, w http.ResponseWriter, e *Exec, stream byte, from uint64) error {
	e.readers.enter()
	defer e.readers.leave()
	out := newFrameWriter(w)
	defer out.close()
	f := follower{rec: e.rec, out: out, stream: stream, pos: from}
	_ = f.follow(ctx)
	return nil
}
