package proc

import (
	"bytes"
	"os"
	"strconv"
	"syscall"
	"time"
)

// killDescendants is for machines without cgroups (the developer mode): it
// kills a process, everything that descends from it, and every session led by
// one of these, until nothing new turns up.
func killDescendants(root int) {
	doomed := map[int]bool{root: true}
	for range 50 {
		// Stopped processes do not fork away while we look for more.
		grown := growTree(doomed)
		for pid := range doomed {
			_ = syscall.Kill(pid, syscall.SIGSTOP)
		}
		if !grown {
			break
		}
	}
	for pid := range doomed {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	// Whoever was being forked meanwhile is an orphan in a known session.
	for range 5 {
		time.Sleep(2 * time.Millisecond)
		if !growTree(doomed) {
			return
		}
		for pid := range doomed {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}

// growTree adds the children and the session members of known processes.
func growTree(known map[int]bool) bool {
	grown := false
	for changed := true; changed; {
		changed = false
		for pid, s := range processes() {
			if !known[pid] && (known[s.parent] || known[s.session]) {
				known[pid] = true
				changed, grown = true, true
			}
		}
	}
	return grown
}

type procStat struct{ parent, session int }

func processes() map[int]procStat {
	out := map[int]procStat{}
	dir, err := os.Open("/proc")
	if err != nil {
		return out
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	for _, n := range names {
		pid, err := strconv.Atoi(n)
		if err != nil {
			continue
		}
		if b, err := os.ReadFile("/proc/" + n + "/stat"); err == nil {
			if s, ok := parseStat(b); ok {
				out[pid] = s
			}
		}
	}
	return out
}

// parseStat reads proc_pid_stat(5); the name in parentheses may hold anything.
func parseStat(b []byte) (procStat, bool) {
	i := bytes.LastIndexByte(b, ')')
	if i < 0 {
		return procStat{}, false
	}
	f := bytes.Fields(b[i+1:])
	if len(f) < 4 || string(f[0]) == "Z" {
		return procStat{}, false
	}
	parent, err1 := strconv.Atoi(string(f[1]))
	session, err2 := strconv.Atoi(string(f[3]))
	return procStat{parent, session}, err1 == nil && err2 == nil
}
