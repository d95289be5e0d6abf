package cgroup

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Stats is what all commands use together; a figure that is not to be had is
// zero.
type Stats struct {
	CPUMicros   int64
	Memory      int64 // without the page cache that can be dropped at once
	MemoryLimit int64
	Processes   int64
	OOMKills    int64
}

// Stats reads the counters of the group above the commands' groups.
func (m *Manager) Stats() Stats {
	s := Stats{
		CPUMicros:   m.key("cpu.stat", "usage_usec"),
		Memory:      m.number("memory.current"),
		MemoryLimit: m.number("memory.max"),
		Processes:   m.number("pids.current"),
		OOMKills:    m.key("memory.events", "oom_kill"),
	}
	s.Memory = max(s.Memory-m.key("memory.stat", "inactive_file"), 0)
	return s
}

// Populated says whether any command or a process it left behind is alive.
func (m *Manager) Populated() bool { return m.key("cgroup.events", "populated") > 0 }

// KillAll kills every process below.
func (m *Manager) KillAll() error { return m.write("cgroup.kill", "1") }

func (m *Manager) key(file, key string) int64 {
	b, err := os.ReadFile(filepath.Join(m.dir, file))
	if err != nil {
		return 0
	}
	return max(findKey(b, key), 0)
}

func (m *Manager) number(file string) int64 {
	b, err := os.ReadFile(filepath.Join(m.dir, file))
	if err != nil {
		return 0
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// Destroy kills what is left and removes the whole hierarchy.
func (m *Manager) Destroy() {
	_ = m.KillAll()
	for range 100 {
		m.mu.Lock()
		m.sweepAll()
		m.mu.Unlock()
		if err := os.Remove(m.dir); err == nil || os.IsNotExist(err) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func (m *Manager) sweepAll() {
	for _, g := range m.free {
		g.remove()
	}
	m.free = nil
	dirs, _ := filepath.Glob(filepath.Join(m.dir, "[0-9]*"))
	for _, d := range dirs {
		_ = os.Remove(d)
	}
}
