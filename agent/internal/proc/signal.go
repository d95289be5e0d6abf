package proc

import (
	"syscall"

	"cloche.dev/agent/internal/cgroup"
	"cloche.dev/agent/internal/wire"
)

// Signal sends a signal to a command: to its process, to the process group of
// that, or to the whole tree, whatever left the group.
func (m *Manager) Signal(id, name, target string) error {
	s, ok := wire.SignalNumber(name)
	if !ok {
		return wire.BadRequest("signal", "want the name of a signal, or a number from 1 to 64")
	}
	m.mu.Lock()
	e := m.running[id]
	known := e != nil || m.recent[id] || m.find(id) != nil
	m.mu.Unlock()
	switch {
	case !known:
		return notFound()
	case e == nil || e.pid.Load() == 0:
		return ended()
	}
	switch target {
	case "", "process":
		return e.signal(s, false)
	case "group":
		return e.signal(s, true)
	case "tree":
		return e.signalTree(s)
	}
	return wire.BadRequest("target", "want process, group or tree")
}

// signal goes to our own child, which has not been reaped: its number, which is
// that of its group as well, can't be anybody else's.
func (e *Exec) signal(s syscall.Signal, group bool) error {
	pid := int(e.pid.Load())
	if !e.m.Reaper.Signal(pid, s, group) {
		return ended()
	}
	return nil
}

// Signal sends a signal to a child that is not reaped yet; false if it is.
func (r *Reaper) Signal(pid int, s syscall.Signal, group bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.waiters[pid]; !ok {
		return false
	}
	if group {
		pid = -pid
	}
	_ = syscall.Kill(pid, s)
	return true
}

// hold says which group is the command's, or that none is any more: another
// command gets it next.
func (e *Exec) hold(g *cgroup.Group) {
	e.signals.Lock()
	defer e.signals.Unlock()
	e.group = g
}

func (e *Exec) signalTree(s syscall.Signal) error {
	e.signals.Lock()
	defer e.signals.Unlock()
	if g := e.group; g != nil {
		if s == syscall.SIGKILL && g.Kill() == nil {
			return nil
		}
		if g.Signal(s) == nil {
			return nil
		}
	}
	return e.signalDescendants(s)
}

// signalDescendants is for machines without cgroups.
func (e *Exec) signalDescendants(s syscall.Signal) error {
	known := map[int]bool{int(e.pid.Load()): true}
	growTree(known)
	if !e.m.Reaper.Signal(int(e.pid.Load()), s, false) {
		return ended()
	}
	for pid := range known {
		if pid != int(e.pid.Load()) {
			_ = syscall.Kill(pid, s)
		}
	}
	return nil
}
