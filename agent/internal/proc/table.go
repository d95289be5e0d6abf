package proc

import (
	"bytes"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"syscall"
	"time"

	"cloche.dev/agent/internal/sys"
)

const (
	// maxListed and maxCommand bound the list of all processes.
	maxListed  = 2048
	maxCommand = 512
	// kernelThread is a flag of proc_pid_stat(5), clockTick its unit of time.
	kernelThread = 0x00200000
	clockTick    = 10 * time.Millisecond
)

// Process is one of all processes of the machine. Names are cut, and what is
// not UTF-8 is replaced on the way to JSON.
type Process struct {
	PID       int     `json:"pid"`
	PPID      int     `json:"ppid"`
	UID       uint32  `json:"uid"`
	User      string  `json:"user"`
	State     string  `json:"state"`
	CPUMS     float64 `json:"cpu_ms"`
	RSSKB     int64   `json:"rss_kb"`
	StartedNS int64   `json:"started_ns"`
	Name      string  `json:"name"`
	Command   string  `json:"command"`
	ExecID    string  `json:"exec_id,omitempty"`
}

// Processes lists what runs, without threads of the kernel, by number. The
// second result says that there are more.
func (m *Manager) Processes() ([]Process, bool) {
	dir, err := os.Open("/proc")
	if err != nil {
		return []Process{}, false
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	var pids []int
	for _, n := range names {
		if pid, err := strconv.Atoi(n); err == nil {
			pids = append(pids, pid)
		}
	}
	sort.Ints(pids)
	boot := time.Now().UnixNano() - sys.ClockBoot()
	groups := m.groups()
	out := []Process{}
	for _, pid := range pids {
		p, ok := m.describe(pid, boot, groups)
		if !ok {
			continue
		}
		if len(out) == maxListed {
			return out, true
		}
		out = append(out, p)
	}
	return out, false
}

// groups are the commands that run, by the names of their groups.
func (m *Manager) groups() map[string]string {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := map[string]string{}
	for id, e := range m.running {
		e.signals.Lock()
		if e.group != nil {
			out[filepath.Base(e.group.Dir())] = id
		}
		e.signals.Unlock()
	}
	return out
}

func (m *Manager) describe(pid int, boot int64, groups map[string]string) (Process, bool) {
	dir := "/proc/" + strconv.Itoa(pid)
	b, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return Process{}, false
	}
	p, flags, ok := parseProcess(b)
	var st syscall.Stat_t
	if !ok || flags&kernelThread != 0 || syscall.Stat(dir, &st) != nil {
		return Process{}, false
	}
	p.PID, p.UID = pid, st.Uid
	p.StartedNS += boot
	p.User = strconv.Itoa(int(st.Uid))
	if id, err := m.Users.Resolve(p.User); err == nil {
		p.User = id.Name
	}
	p.Command = commandLine(dir)
	if m.Cgroups != nil {
		if b, err := os.ReadFile(dir + "/cgroup"); err == nil {
			for line := range strings.Lines(string(b)) {
				if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok && inCommands(path, m.Cgroups.Dir()) {
					p.ExecID = groups[filepath.Base(path)]
				}
			}
		}
	}
	return p, true
}

// inCommands says whether a group is one of those of commands.
func inCommands(path, dir string) bool {
	return filepath.Base(filepath.Dir(path)) == filepath.Base(dir)
}

// parseProcess reads proc_pid_stat(5). The start is counted from boot.
func parseProcess(b []byte) (Process, uint64, bool) {
	i, j := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	if i < 0 || j < i {
		return Process{}, 0, false
	}
	f := strings.Fields(string(b[j+1:]))
	if len(f) < 22 {
		return Process{}, 0, false
	}
	number := func(n int) int64 {
		v, _ := strconv.ParseInt(f[n-3], 10, 64)
		return v
	}
	ticks := number(14) + number(15)
	return Process{
		PPID:      int(number(4)),
		State:     f[0],
		CPUMS:     float64(ticks) * float64(clockTick.Milliseconds()),
		RSSKB:     number(24) * int64(os.Getpagesize()) / 1024,
		StartedNS: number(22) * int64(clockTick),
		Name:      string(b[i+1 : j]),
	}, uint64(number(9)), true
}

// commandLine is what a process was started with; empty for one that has ended.
func commandLine(dir string) string {
	f, err := os.Open(dir + "/cmdline")
	if err != nil {
		return ""
	}
	defer f.Close()
	b := make([]byte, maxCommand)
	n, _ := f.Read(b)
	return strings.TrimRight(strings.ReplaceAll(string(b[:max(n, 0)]), "\x00", " "), " ")
}
