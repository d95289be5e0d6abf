package boot

import (
	"fmt"
	"os"
	"syscall"

	"cloche.dev/agent/internal/sys"
)

// Log writes one line to the console. There are few of them: nothing is
// logged per command.
func Log(format string, args ...any) {
	t := sys.ClockBoot()
	line := fmt.Sprintf("[%5d.%06d] cloche-agent: ", t/1e9, t%1e9/1e3) + fmt.Sprintf(format, args...) + "\n"
	f, err := os.OpenFile("/dev/console", os.O_WRONLY|syscall.O_NOCTTY, 0)
	if err != nil {
		_, _ = os.Stderr.WriteString(line)
		return
	}
	_, _ = f.WriteString(line)
	_ = f.Close()
}
