// Package proc starts commands, moves their output and sees to their end.
package proc

import (
	"os"
	"os/signal"
	"sync"
	"syscall"

	"cloche.dev/agent/internal/sys"
)

// Ended is how a child ended.
type Ended struct {
	Status syscall.WaitStatus
	Usage  syscall.Rusage
}

// Reaper collects every child of this process: those that somebody waits for
// and the orphans that fall to process 1. Nothing else may call wait.
type Reaper struct {
	mu      sync.Mutex
	waiters map[int]chan<- Ended
	signals chan os.Signal
}

// NewReaper makes a reaper; Run must be called.
func NewReaper() *Reaper {
	r := &Reaper{waiters: map[int]chan<- Ended{}, signals: make(chan os.Signal, 1)}
	signal.Notify(r.signals, syscall.SIGCHLD)
	return r
}

// Start runs fork, which starts a process, and registers for its end. The lock
// is held meanwhile, so that a child that ends at once is not taken for an
// orphan.
func (r *Reaper) Start(fork func() (int, error)) (int, <-chan Ended, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	pid, err := fork()
	if err != nil {
		return 0, nil, err
	}
	c := make(chan Ended, 1)
	r.waiters[pid] = c
	return pid, c, nil
}

// Run reaps until stop is closed.
func (r *Reaper) Run(stop <-chan struct{}) {
	for {
		r.reapAll()
		select {
		case <-r.signals:
		case <-stop:
			signal.Stop(r.signals)
			return
		}
	}
}

// reapAll looks before it takes: the exit status of a child must only be
// consumed under the lock.
func (r *Reaper) reapAll() {
	for {
		pid, err := sys.PeekExited()
		if err == syscall.EINTR {
			continue
		}
		if err != nil || pid == 0 {
			return
		}
		r.reap(pid)
	}
}

func (r *Reaper) reap(pid int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var e Ended
	// A failed start is reaped by the runtime itself, so the child may be
	// gone by now.
	got, err := syscall.Wait4(pid, &e.Status, syscall.WNOHANG, &e.Usage)
	if err != nil || got != pid {
		return
	}
	if c, ok := r.waiters[pid]; ok {
		delete(r.waiters, pid)
		c <- e
	}
}
