package cgroup

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"cloche.dev/agent/internal/sys"
)

// signalRounds is how often the group is looked through for processes that
// were born meanwhile.
const signalRounds = 5

// Signal sends a signal once to every process of the group. A process is held
// before it is looked for a second time, so that no number that was given to
// somebody else is met.
func (g *Group) Signal(s syscall.Signal) error {
	done := map[int]bool{}
	for range signalRounds {
		pids, err := g.Pids()
		if err != nil {
			return err
		}
		held := map[int]sys.Pidfd{}
		for _, pid := range pids {
			if done[pid] {
				continue
			}
			if fd, err := sys.OpenPidfd(pid); err == nil {
				held[pid] = fd
			}
		}
		if len(held) == 0 {
			return nil
		}
		pids, err = g.Pids()
		for _, pid := range pids {
			if fd, ok := held[pid]; ok {
				done[pid] = true
				_ = fd.Signal(s)
			}
		}
		for _, fd := range held {
			fd.Close()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Pids are the processes of the group.
func (g *Group) Pids() ([]int, error) {
	b, err := os.ReadFile(filepath.Join(g.dir, "cgroup.procs"))
	if err != nil {
		return nil, err
	}
	var out []int
	for _, f := range bytes.Fields(b) {
		if pid, err := strconv.Atoi(string(f)); err == nil && pid > 0 {
			out = append(out, pid)
		}
	}
	return out, nil
}

// Dir is the directory of the group.
func (g *Group) Dir() string { return g.dir }
