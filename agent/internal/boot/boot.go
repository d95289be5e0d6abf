// Package boot turns an initramfs into a running machine whose process 1 is
// still the agent. It expects nothing of the image but a file system.
package boot

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"cloche.dev/agent/internal/sys"
)

const (
	rootDevice = "/dev/vda"
	newRoot    = "/newroot"
	diskWait   = 30 * time.Second
)

// Root mounts the disk and moves into it. Only what makes the machine useless
// is an error.
func Root() error {
	syscall.Umask(0)
	mounts := []mount{
		{"proc", "/proc", "proc", syscall.MS_NOSUID | syscall.MS_NODEV | syscall.MS_NOEXEC, ""},
		{"sysfs", "/sys", "sysfs", syscall.MS_NOSUID | syscall.MS_NODEV | syscall.MS_NOEXEC, ""},
		{"devtmpfs", "/dev", "devtmpfs", syscall.MS_NOSUID, "mode=755,size=4m"},
	}
	for _, m := range mounts {
		if err := m.do(); err != nil && !errors.Is(err, syscall.EBUSY) {
			return err
		}
	}
	quietKernel()
	loadModules("/modules/list")
	if err := waitFor(rootDevice, diskWait); err != nil {
		return err
	}
	if err := (mount{rootDevice, newRoot, "ext4", syscall.MS_NOATIME, ""}).do(); err != nil {
		return err
	}
	return switchRoot()
}

type mount struct {
	source, target, fs string
	flags              uintptr
	data               string
}

// do makes the mount point if it is missing.
func (m mount) do() error {
	if err := os.MkdirAll(m.target, 0o755); err != nil {
		return err
	}
	if err := syscall.Mount(m.source, m.target, m.fs, m.flags, m.data); err != nil {
		return fmt.Errorf("mount %s on %s: %w", m.fs, m.target, err)
	}
	return nil
}

// quietKernel keeps the kernel's chatter off the console; the log itself has
// it all.
func quietKernel() {
	_ = os.WriteFile("/proc/sys/kernel/printk", []byte("3 4 1 3\n"), 0)
}

// loadModules loads the listed modules in their order. One that fails is
// worth a line: the machine may do without it.
func loadModules(list string) {
	b, err := os.ReadFile(list)
	if err != nil {
		return
	}
	for line := range strings.Lines(string(b)) {
		path := strings.TrimSpace(line)
		if path == "" || path[0] == '#' {
			continue
		}
		if !filepath.IsAbs(path) {
			path = filepath.Join(filepath.Dir(list), path)
		}
		if err := loadModule(path); err != nil && !errors.Is(err, syscall.EEXIST) {
			Log("module %s: %v", path, err)
		}
	}
}

func loadModule(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return sys.InitModule(int(f.Fd()), "")
}

func waitFor(path string, d time.Duration) error {
	deadline := time.Now().Add(d)
	for {
		_, err := os.Stat(path)
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s did not appear in %v", path, d)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// switchRoot does what switch_root(8) does, and frees the initramfs.
func switchRoot() error {
	for _, dir := range []string{"/dev", "/proc", "/sys"} {
		to := newRoot + dir
		if err := os.MkdirAll(to, 0o755); err != nil {
			return err
		}
		if err := syscall.Mount(dir, to, "", syscall.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move %s: %w", dir, err)
		}
	}
	_ = os.RemoveAll("/modules")
	_ = os.Remove("/init")
	if err := syscall.Chdir(newRoot); err != nil {
		return err
	}
	if err := syscall.Mount(".", "/", "", syscall.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the root: %w", err)
	}
	if err := syscall.Chroot("."); err != nil {
		return err
	}
	return syscall.Chdir("/")
}
