package cgroup

import (
	"os"
	"time"

	"cloche.dev/agent/internal/sys"
)

// Freeze makes every process below stand still. It returns when all do; if
// some do not by the deadline, all go on and the error is
// os.ErrDeadlineExceeded. A frozen process can be killed.
func (m *Manager) Freeze(deadline time.Time) error {
	if err := m.write("cgroup.freeze", "1"); err != nil {
		return err
	}
	if sys.Await(deadline, func() bool { return m.key("cgroup.events", "frozen") > 0 }) {
		return nil
	}
	_ = m.Thaw()
	return os.ErrDeadlineExceeded
}

// Thaw lets them go on.
func (m *Manager) Thaw() error { return m.write("cgroup.freeze", "0") }
