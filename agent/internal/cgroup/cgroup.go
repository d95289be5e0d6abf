// Package cgroup keeps the control groups in which commands run.
package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
)

// Limits bound all commands together.
type Limits struct {
	MemoryMax int64 // bytes, 0 = none
	PidsMax   int64 // 0 = none
}

// Manager hands out one group per command. Making a group is slow and a
// removed one lingers in the kernel as long as a cached page is charged to
// it, so an empty group is used again for the next command.
type Manager struct {
	dir    string
	leaf   Limits
	mu     sync.Mutex
	next   int
	free   []*Group // empty
	linger []*Group // of commands that left processes behind
}

// keepFree is how many empty groups are kept for later.
const keepFree = 16

// Group is the control group of one command.
type Group struct {
	dir    string
	fd     int // the directory, for clone
	events int // memory.events, or -1
	state  int // cgroup.events
	ooms   int64
	killed bool
}

// New prepares dir below a mounted cgroup2 hierarchy. Controllers and limits
// that the kernel does not offer are left out.
func New(dir string, l Limits) (*Manager, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	if err := syscall.Access(filepath.Join(dir, "cgroup.kill"), 2); err != nil {
		return nil, fmt.Errorf("%s has no cgroup.kill: %w", dir, err)
	}
	m := &Manager{dir: dir}
	for _, c := range []string{"memory", "pids", "cpu"} {
		_ = m.write("../cgroup.subtree_control", "+"+c)
		_ = m.write("cgroup.subtree_control", "+"+c)
	}
	if l.MemoryMax > 0 {
		_ = m.write("memory.max", strconv.FormatInt(l.MemoryMax, 10))
		_ = m.write("memory.oom.group", "0")
	}
	if l.PidsMax > 0 {
		_ = m.write("pids.max", strconv.FormatInt(l.PidsMax, 10))
		// One command that forks without end leaves room for another.
		m.leaf.PidsMax = l.PidsMax - l.PidsMax/8
	}
	return m, nil
}

// Dir is the group that holds the groups of all commands.
func (m *Manager) Dir() string { return m.dir }

func (m *Manager) write(name, value string) error {
	return os.WriteFile(filepath.Join(m.dir, name), []byte(value), 0)
}

// Acquire gives an empty group.
func (m *Manager) Acquire() (*Group, error) {
	m.mu.Lock()
	m.sweep()
	if n := len(m.free); n > 0 {
		g := m.free[n-1]
		m.free = m.free[:n-1]
		m.mu.Unlock()
		return g, nil
	}
	m.next++
	name := strconv.Itoa(m.next)
	m.mu.Unlock()
	return m.create(filepath.Join(m.dir, name))
}

// Release takes a group back after its command has ended. Processes that are
// still in it go on living there.
func (m *Manager) Release(g *Group) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.sort(g)
}

// Drop gives up a group that user code has removed.
func (m *Manager) Drop(g *Group) { g.remove() }

// sort puts a group where it belongs. The lock is held.
func (m *Manager) sort(g *Group) {
	switch n := g.populated(); {
	case n > 0:
		m.linger = append(m.linger, g)
	case n < 0 || g.killed || len(m.free) >= keepFree:
		g.remove()
	default:
		g.ooms = g.oomKills()
		m.free = append(m.free, g)
	}
}

// sweep looks at a few of the groups that had processes left.
func (m *Manager) sweep() {
	for range min(4, len(m.linger)) {
		g := m.linger[0]
		m.linger = m.linger[1:]
		m.sort(g)
	}
}

func (m *Manager) create(dir string) (*Group, error) {
	if err := syscall.Mkdir(dir, 0o755); err != nil && !errors.Is(err, syscall.EEXIST) {
		return nil, err
	}
	g := &Group{dir: dir, fd: -1, events: -1, state: -1}
	var err error
	if g.fd, err = open(dir, syscall.O_DIRECTORY); err == nil {
		g.state, err = open(filepath.Join(dir, "cgroup.events"), 0)
	}
	if err != nil {
		g.remove()
		return nil, err
	}
	if fd, err := open(filepath.Join(dir, "memory.events"), 0); err == nil {
		g.events = fd
	}
	if m.leaf.PidsMax > 0 {
		_ = os.WriteFile(filepath.Join(dir, "pids.max"), strconv.AppendInt(nil, m.leaf.PidsMax, 10), 0)
	}
	return g, nil
}

func open(path string, flags int) (int, error) {
	return syscall.Open(path, syscall.O_RDONLY|syscall.O_CLOEXEC|flags, 0)
}

// FD is the directory's descriptor, for SysProcAttr.CgroupFD.
func (g *Group) FD() int { return g.fd }

// Kill sends SIGKILL to every process of the group, whatever session or
// process group it has moved to, and to those that are being forked. The group
// is not used again: newer kernels kill whoever is born into one that has been
// killed before.
func (g *Group) Kill() error {
	g.killed = true
	return os.WriteFile(filepath.Join(g.dir, "cgroup.kill"), []byte("1"), 0)
}

// populated is 1 with a living process in the group, 0 without, and -1 when
// the group is gone.
func (g *Group) populated() int64 { return readKey(g.state, "populated") }

// OOMKills counts the processes of the current command that the kernel has
// killed for want of memory.
func (g *Group) OOMKills() int64 { return max(g.oomKills()-g.ooms, 0) }

func (g *Group) oomKills() int64 {
	if g.events < 0 {
		return 0
	}
	return max(readKey(g.events, "oom_kill"), 0)
}

// remove also gives up what only was half made.
func (g *Group) remove() {
	for _, fd := range []int{g.fd, g.events, g.state} {
		if fd >= 0 {
			_ = syscall.Close(fd)
		}
	}
	_ = syscall.Rmdir(g.dir)
}

// readKey finds "key number" in an open file; -1 if it is not there.
func readKey(fd int, key string) int64 {
	var buf [512]byte
	n, err := syscall.Pread(fd, buf[:], 0)
	if err != nil {
		return -1
	}
	return findKey(buf[:n], key)
}

func findKey(b []byte, key string) int64 {
	for line := range bytes.Lines(b) {
		k, v, ok := bytes.Cut(bytes.TrimSpace(line), []byte(" "))
		if ok && string(k) == key {
			if n, err := strconv.ParseInt(string(v), 10, 64); err == nil {
				return n
			}
		}
	}
	return -1
}
