package machine

import (
	"io"
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
	CAPEM     string `json:"ca_pem"`
	GrowDisk  bool   `json:"grow_disk"`
	Warm      bool   `json:"warm"`
	Thaw      bool   `json:"thaw"`

	Network *Network `json:"network"`

	// Arrived is when the request came: TimeNS was true then.
	Arrived time.Time `json:"-"`
}

// Renewed is its answer: what was done and how many milliseconds it took.
type Renewed struct {
	Steps  steps `json:"steps"`
	DiskMB int64 `json:"disk_mb"`
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
	if r.Network != nil {
		if _, _, err := r.Network.parse(); err != nil {
			return err
		}
	}
	if r.CAPEM != "" {
		return checkPEM(r.CAPEM)
	}
	return nil
}

func only(s string, low, high int, set string) bool {
	return len(s) >= low && len(s) <= high && strings.Trim(s, set) == ""
}

// Renew makes a restored machine different from its siblings. If it was frozen
// when it was copied, the disk is thawed first, because some steps write to it,
// and the commands last of all. The time limit of the freeze cannot end it in
// the middle of this: user code would run too early, and be cancelled.
func (m *Machine) Renew(r *Renew) (*Renewed, error) {
	out := &Renewed{Steps: steps{}}
	m.freezing.Lock()
	defer m.freezing.Unlock()
	if m.frozen != nil {
		if err := m.frozen.thawDisk(); err != nil {
			return nil, err
		}
	}
	for _, s := range []struct {
		name   string
		wanted bool
		do     func() error
	}{
		{"entropy", r.Entropy != nil, func() error { return addEntropy(r.Entropy) }},
		{"hostname", r.Hostname != "", func() error { return setHostname(r.Hostname) }},
		{"machine_id", r.MachineID != "", func() error { return setMachineID(r.MachineID) }},
		{"network", r.Network != nil, func() error { return setNetwork(r.Network) }},
		{"ca", r.CAPEM != "", func() error { return setAuthority("/", r.CAPEM) }},
		{"time", r.TimeNS != nil, func() error { return sys.SetClock(*r.TimeNS + int64(time.Since(r.Arrived))) }},
		{"grow_disk", r.GrowDisk, growDisk},
		{"warm", r.Warm, m.warm},
	} {
		if !s.wanted || !m.Real {
			continue
		}
		if err := out.Steps.do(s.name, s.do); err != nil {
			return nil, err
		}
	}
	if r.Thaw && m.expired {
		// In a copy that means: its commands have run with the random numbers
		// that all copies have.
		out.Steps["thawed_early"] = 0
		m.expired = false
	}
	if r.Thaw {
		if err := out.Steps.do("thaw", func() error { return m.thaw(true) }); err != nil {
			return nil, err
		}
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

// setContent makes content all that a small file of the image holds. One of
// the same size is overwritten where it is: that costs the disk no new block,
// and under emulation a tenth of the time that a new file takes.
func setContent(path, content string) error {
	if overwrite(path, content) {
		return nil
	}
	return replaceFile(path, content)
}

// overwrite answers whether it was possible. What user code has put there
// instead of a file is not opened for real.
func overwrite(path, content string) bool {
	fd, err := syscall.Open(path, syscall.O_WRONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer func() { _ = syscall.Close(fd) }()
	if !regular(fd, int64(len(content))) {
		return false
	}
	n, err := syscall.Pwrite(fd, []byte(content), 0)
	return err == nil && n == len(content)
}

// regular says whether fd is a file; and of this size, if size is not -1.
func regular(fd int, size int64) bool {
	var st syscall.Stat_t
	return syscall.Fstat(fd, &st) == nil && st.Mode&syscall.S_IFMT == syscall.S_IFREG && (size < 0 || st.Size == size)
}

// smallFile is the most that contentOf reads.
const smallFile = 1 << 20

// contentOf reads a small file of the image; what is none counts as empty.
func contentOf(path string) string {
	fd, err := syscall.Open(path, syscall.O_RDONLY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	if !regular(fd, -1) {
		return ""
	}
	b, _ := io.ReadAll(io.LimitReader(f, smallFile))
	return string(b)
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
