// Package machine answers for the sandbox as a whole: what it is, what it
// uses, and what must change after a restore.
package machine

import (
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"cloche.dev/agent/internal/cgroup"
	"cloche.dev/agent/internal/link"
	"cloche.dev/agent/internal/sys"
)

// Version is the agent's own.
const Version = "0.1.0"

// Machine is the sandbox.
type Machine struct {
	// Real is false in developer mode: then nothing outside the agent is
	// changed.
	Real    bool
	Cgroups *cgroup.Manager // may be nil
	// Warm runs a command for nothing but its side effects on caches.
	Warm     func(argv []string)
	Commands Commands
	// PowerOff ends the machine.
	PowerOff func()

	freezing sync.Mutex // held while the state changes, and through a renewal
	frozen   *frozen    // nil: the machine is not frozen
	expired  bool       // the last freeze has ended by its time limit
}

// Info is the answer of GET /v1/info.
type Info struct {
	Generation int    `json:"generation"`
	Version    string `json:"version"`
	BootID     string `json:"boot_id"`
	PID        int    `json:"pid"`
	UptimeMS   int64  `json:"uptime_ms"`
	CPUs       int    `json:"cpus"`
	MemoryMB   int64  `json:"memory_mb"`
	DiskMB     int64  `json:"disk_mb"`
	Running    int    `json:"execs_running"`
}

// Info describes the machine.
func (m *Machine) Info(running int) Info {
	id, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	_, disk := diskUse()
	return Info{
		Generation: link.Generation,
		Version:    Version,
		BootID:     strings.TrimSpace(string(id)),
		PID:        os.Getpid(),
		UptimeMS:   sys.ClockBoot() / 1e6,
		CPUs:       runtime.NumCPU(),
		MemoryMB:   MemTotal() >> 20,
		DiskMB:     disk >> 20,
		Running:    running,
	}
}

// MemTotal is the memory that the kernel has to give, in bytes.
func MemTotal() int64 {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "MemTotal:"); ok {
			f := strings.Fields(rest)
			if len(f) > 0 {
				kb, _ := strconv.ParseInt(f[0], 10, 64)
				return kb << 10
			}
		}
	}
	return 0
}

// diskUse is the root file system's used and total size in bytes.
func diskUse() (used, total int64) {
	var st syscall.Statfs_t
	if syscall.Statfs("/", &st) != nil {
		return 0, 0
	}
	total = int64(st.Blocks) * st.Bsize
	return total - int64(st.Bfree)*st.Bsize, total
}

// Usage is the answer of GET /v1/usage.
type Usage struct {
	CPUMS       float64 `json:"cpu_ms"`
	Memory      int64   `json:"memory_bytes"`
	MemoryLimit int64   `json:"memory_limit_bytes"`
	Processes   int64   `json:"processes"`
	DiskUsed    int64   `json:"disk_used_bytes"`
	Disk        int64   `json:"disk_bytes"`
	OOMKills    int64   `json:"oom_kills"`
}

// Usage measures what user code takes.
func (m *Machine) Usage() Usage {
	var s cgroup.Stats
	if m.Cgroups != nil {
		s = m.Cgroups.Stats()
	}
	if s.MemoryLimit == 0 {
		s.MemoryLimit = MemTotal()
	}
	u := Usage{
		CPUMS: float64(s.CPUMicros) / 1000, Memory: s.Memory, MemoryLimit: s.MemoryLimit,
		Processes: s.Processes, OOMKills: s.OOMKills,
	}
	u.DiskUsed, u.Disk = diskUse()
	return u
}

// Limits derives the bounds of user code from the machine: what is kept back
// is for the kernel and the agent.
func Limits() cgroup.Limits {
	total := MemTotal()
	l := cgroup.Limits{PidsMax: 512}
	if total > 0 {
		l.MemoryMax = total - max(24<<20, total*8/100)
	}
	if n := min(readInt("/proc/sys/kernel/threads-max"), readInt("/proc/sys/kernel/pid_max")); n > 0 {
		l.PidsMax = max(512, n*9/10)
	}
	return l
}

func readInt(path string) int64 {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return n
}
