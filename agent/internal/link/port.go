package link

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// PortName is the name that the host gives to the agent's port.
const PortName = "cloche.agent.0"

// Port is a virtio-serial port. Without a host a read gives zero bytes at
// once; the driver wakes its waiters when a host comes. The runtime's poller
// is edge-triggered, so that waiting for that moment costs nothing.
type Port struct {
	file *os.File
	raw  syscall.RawConn
}

// OpenPort waits up to the given time for the port with our name to appear.
func OpenPort(wait time.Duration) (*Port, error) {
	deadline := time.Now().Add(wait)
	for {
		if path := findPort(); path != "" {
			return openPort(path)
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("no virtio port named %s", PortName)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func findPort() string {
	names, _ := filepath.Glob("/sys/class/virtio-ports/*/name")
	for _, n := range names {
		if b, err := os.ReadFile(n); err == nil && strings.TrimSpace(string(b)) == PortName {
			dev := filepath.Join("/dev", filepath.Base(filepath.Dir(n)))
			if _, err := os.Stat(dev); err == nil {
				return dev
			}
		}
	}
	return ""
}

func openPort(path string) (*Port, error) {
	fd, err := syscall.Open(path, syscall.O_RDWR|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	return &Port{file: f, raw: raw}, nil
}

// Read gives io.EOF while no host is connected.
func (p *Port) Read(b []byte) (int, error) {
	return p.read(b, false)
}

// ReadWait waits for a host and its first bytes.
func (p *Port) ReadWait(b []byte) (int, error) {
	return p.read(b, true)
}

func (p *Port) read(b []byte, wait bool) (n int, err error) {
	if len(b) == 0 {
		return 0, nil
	}
	werr := p.raw.Read(func(fd uintptr) bool {
		for {
			n, err = syscall.Read(int(fd), b)
			if err != syscall.EINTR {
				break
			}
		}
		return err != syscall.EAGAIN && (n != 0 || err != nil || !wait)
	})
	if werr != nil {
		return 0, werr
	}
	if n == 0 && err == nil {
		err = io.EOF
	}
	return max(n, 0), err
}

// Close closes the port.
func (p *Port) Close() error { return p.file.Close() }

func (p *Port) Write(b []byte) (int, error)        { return p.file.Write(b) }
func (p *Port) SetReadDeadline(t time.Time) error  { return p.file.SetReadDeadline(t) }
func (p *Port) SetWriteDeadline(t time.Time) error { return p.file.SetWriteDeadline(t) }
