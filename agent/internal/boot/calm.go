package boot

import (
	"os"
	"slices"
	"strconv"
)

// monitorSlack is how far the kernel may put off the wake-ups of the Go
// runtime's monitor thread.
const monitorSlack = 2_000_000 // ns

// CalmMonitor slows the runtime's monitor thread down. While anything runs it
// wakes up every 20 µs to look for goroutines that are stuck in system calls,
// which under emulation takes a third of the agent's processor time. The
// thread is the first that the runtime starts.
//
// Threads that the monitor starts inherit the slack; fork puts it right for
// commands (sys.DefaultSlack).
func CalmMonitor() {
	entries, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return
	}
	var ids []int
	for _, e := range entries {
		if id, err := strconv.Atoi(e.Name()); err == nil && id != os.Getpid() {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		return
	}
	path := "/proc/" + strconv.Itoa(slices.Min(ids)) + "/timerslack_ns"
	_ = os.WriteFile(path, []byte(strconv.Itoa(monitorSlack)), 0)
}
