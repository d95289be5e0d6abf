package boot

import (
	"os"
	"slices"
	"strconv"
)

// monitorSlack is how far the kernel may put off the wake-ups of the Go
// runtime's monitor thread.
const monitorSlack = 20_000_000 // ns

// CalmMonitor slows the runtime's monitor thread down. While anything runs it
// wakes up every 20 µs to look for goroutines that are stuck in system calls.
// Each time it interrupts the command that runs, and two switches of the
// address space empty the TLB, which under emulation costs a millisecond. The
// price: a goroutine in a long system call holds up the others for up to
// twice this time. The thread is the first that the runtime starts.
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
