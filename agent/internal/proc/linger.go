package proc

import (
	"sync"
	"syscall"
	"time"

	"cloche.dev/agent/internal/wire"
)

// hangUpGrace is what a command has between the hang-up and its end.
const hangUpGrace = 2 * time.Second

// audience counts the readers of a command that is to end when it has had none
// for a while. Without a limit it does nothing.
type audience struct {
	limit time.Duration
	end   func()

	mu      sync.Mutex
	readers int
	timer   *time.Timer
	over    bool
}

func (a *audience) enter() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.readers++
	if a.timer != nil {
		a.timer.Stop()
	}
}

func (a *audience) leave() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.readers--
	if a.limit == 0 || a.readers > 0 || a.over {
		return
	}
	if a.timer == nil {
		a.timer = time.AfterFunc(a.limit, a.expired)
		return
	}
	a.timer.Reset(a.limit)
}

func (a *audience) expired() {
	a.mu.Lock()
	gone := a.readers == 0 && !a.over
	a.over = a.over || gone
	a.mu.Unlock()
	if gone {
		a.end()
	}
}

// stop is for a command that has ended.
func (a *audience) stop() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.over = true
	if a.timer != nil {
		a.timer.Stop()
	}
}

// hangUp ends a command as the end of its line does: it may say farewell.
func (e *Exec) hangUp() {
	_ = e.signalTree(syscall.SIGHUP)
	_ = e.signalTree(syscall.SIGCONT)
	time.AfterFunc(hangUpGrace, func() { e.stop(wire.ReasonCancelled) })
}
