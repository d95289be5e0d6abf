package machine

import (
	"os"
	"strings"
	"syscall"
	"time"

	"cloche.dev/agent/internal/sys"
	"cloche.dev/agent/internal/wire"
)

// Renew is the body of POST /v1/renew.
type Renew struct {
	Entropy   []byte `json:"entropy"`
	TimeNS    *int64 `json:"time_ns"`
	Hostname  string `json:"hostname"`
	MachineID string `json:"machine_id"`
	GrowDisk  bool   `json:"grow_disk"`
	Warm      bool   `json:"warm"`

	// Arrived is when the request came: TimeNS was true then.
	Arrived time.Time `json:"-"`
}

// Renewed is its answer: what was done and how many milliseconds it took.
type Renewed struct {
	Steps  map[string]float64 `json:"steps"`
	DiskMB int64              `json:"disk_mb"`
}

// Check refuses what is malformed before anything is done.
func (r *Renew) Check() error {
	if n := len(r.Entropy); r.Entropy != nil && (n < 32 || n > 512) {
		return wire.BadRequest("entropy", "want 32 to 512 bytes")
	}
	if r.TimeNS != nil && *r.TimeNS < 0 {
		return wire.BadRequest("time_ns", "before 1970")
	}
	if r.Hostname != "" && !only(r.Hostname, 1, 63, "abcdefghijklmnopqrstuvwxyz0123456789-") {
		return wire.BadRequest("hostname", "want 1 to 63 characters a-z, 0-9 and -")
	}
	if r.MachineID != "" && !only(r.MachineID, 32, 32, "0123456789abcdef") {
		return wire.BadRequest("machine_id", "want 32 hex digits")
	}
	return nil
}

func only(s string, low, high int, set string) bool {
	return len(s) >= low && len(s) <= high && strings.Trim(s, set) == ""
}

// Renew makes a restored machine different from its siblings.
func (m *Machine) Renew(r *Renew) (*Renewed, error) {
	out := &Renewed{Steps: map[string]float64{}}
	steps := []struct {
		name   string
		wanted bool
		do     func() error
	}{
		{"entropy", r.Entropy != nil, func() error { return addEntropy(r.Entropy) }},
		{"hostname", r.Hostname != "", func() error { return setHostname(r.Hostname) }},
		{"machine_id", r.MachineID != "", func() error { return setMachineID(r.MachineID) }},
		{"time", r.TimeNS != nil, func() error { return sys.SetClock(*r.TimeNS + int64(time.Since(r.Arrived))) }},
		{"grow_disk", r.GrowDisk, growDisk},
		{"warm", r.Warm, m.warm},
	}
	for _, s := range steps {
		if !s.wanted || !m.Real {
			continue
		}
		start := time.Now()
		if err := s.do(); err != nil {
			return nil, wire.FromErr(err, s.name)
		}
		out.Steps[s.name] = float64(time.Since(start).Microseconds()) / 1000
	}
	_, total := diskUse()
	out.DiskMB = total >> 20
	return out, nil
}

func (m *Machine) warm() error {
	if m.Warm != nil {
		m.Warm([]string{"/bin/true"})
		m.Warm(nil)
	}
	return nil
}

// Quiesce brings everything onto the disk.
func (m *Machine) Quiesce() {
	if m.Real {
		syscall.Sync()
	}
}

// replaceFile writes a small file of the image in one step; one that is a
// mount point of its own is written in place.
func replaceFile(path, content string) error {
	tmp := path + ".cloche-tmp"
	err := os.WriteFile(tmp, []byte(content), 0o644)
	if err == nil {
		if err = os.Rename(tmp, path); err == nil {
			return nil
		}
		_ = os.Remove(tmp)
	}
	return os.WriteFile(path, []byte(content), 0o644)
}
