package machine

import (
	"syscall"
	"time"
)

// Shutdown asks every process to end, gives them the time of grace, and turns
// the machine off. It does not return on a real machine.
func (m *Machine) Shutdown(grace time.Duration) {
	if !m.Real {
		return
	}
	// A frozen process does not hear a signal.
	_ = m.Thaw(true)
	const everybody = -1
	_ = syscall.Kill(everybody, syscall.SIGTERM)
	deadline := time.Now().Add(grace)
	for time.Now().Before(deadline) && m.busy() {
		time.Sleep(10 * time.Millisecond)
	}
	_ = syscall.Kill(everybody, syscall.SIGKILL)
	for range 100 {
		if !m.busy() {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	m.PowerOff()
}

func (m *Machine) busy() bool {
	return m.Cgroups == nil || m.Cgroups.Populated()
}
