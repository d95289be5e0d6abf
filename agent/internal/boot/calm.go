package boot

import (
	"os"
	"slices"
	"strconv"

	"cloche.dev/agent/internal/sys"
)

// CalmMonitor slows the runtime's monitor thread down. Each time that it
// interrupts the command that runs, two switches of the address space empty the
// TLB, which under emulation costs a millisecond. The
// price: a goroutine in a long system call holds up the others for up to
// twice this time. The thread is the first that the runtime starts.
//
// Threads that the monitor starts inherit the slack; fork puts it right for
// commands (sys.SetSlack).
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
	_ = os.WriteFile(path, []byte(strconv.FormatInt(sys.MonitorSlack.Nanoseconds(), 10)), 0)
}
