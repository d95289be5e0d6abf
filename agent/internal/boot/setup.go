package boot

import (
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"
	"unsafe"

	"cloche.dev/agent/internal/sys"
)

// Setup makes what every Linux program expects. The image may be odd or full:
// nothing here stops the boot.
func Setup() {
	const safe = syscall.MS_NOSUID | syscall.MS_NODEV
	try := func(err error) {
		if err != nil {
			Log("%v", err)
		}
	}
	try(mount{"devpts", "/dev/pts", "devpts", syscall.MS_NOSUID | syscall.MS_NOEXEC, "gid=5,mode=620,ptmxmode=666"}.do())
	try(mount{"tmpfs", "/dev/shm", "tmpfs", safe, "mode=1777"}.do())
	_ = mount{"mqueue", "/dev/mqueue", "mqueue", safe | syscall.MS_NOEXEC, ""}.do()
	// What lies in memory can be taken from nobody by killing him. With all of
	// these full there has to be enough left to run a command with.
	try(mount{"tmpfs", "/run", "tmpfs", safe, "mode=755,size=10%"}.do())
	try(mount{"cgroup2", "/sys/fs/cgroup", "cgroup2", safe | syscall.MS_NOEXEC, "nsdelegate"}.do())
	for name, to := range map[string]string{
		"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
	} {
		_ = os.Symlink(to, filepath.Join("/dev", name))
	}
	sticky("/tmp")
	sticky("/run/lock")
	try(loopback())
	try(syscall.Sethostname([]byte("sandbox")))
	// Unprivileged ping, as container engines allow it.
	_ = os.WriteFile("/proc/sys/net/ipv4/ping_group_range", []byte("0 2147483647"), 0)
	// Commands have control groups; a scheduling group per session besides
	// would only make each of them start more slowly.
	_ = os.WriteFile("/proc/sys/kernel/sched_autogroup_enabled", []byte("0"), 0)
	syscall.Umask(0o022)
}

func sticky(dir string) {
	_ = os.MkdirAll(dir, 0o777)
	if st, err := os.Lstat(dir); err == nil && st.IsDir() {
		_ = os.Chmod(dir, 0o777|os.ModeSticky)
	}
}

// loopback sets the interface lo up.
func loopback() error {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer syscall.Close(fd)
	var ifreq struct {
		name  [syscall.IFNAMSIZ]byte
		flags uint16
		_     [22]byte
	}
	copy(ifreq.name[:], "lo")
	ifreq.flags = syscall.IFF_UP | syscall.IFF_RUNNING
	return os.NewSyscallError("set lo up", sys.Ioctl(fd, syscall.SIOCSIFFLAGS, unsafe.Pointer(&ifreq)))
}

// Limits gives this process, and so every command, its resource limits.
func Limits() {
	nofile := syscall.Rlimit{Cur: 65536, Max: 1 << 20}
	if syscall.Setrlimit(syscall.RLIMIT_NOFILE, &nofile) != nil && syscall.Getrlimit(syscall.RLIMIT_NOFILE, &nofile) == nil {
		// In developer mode the host may have set a lower limit.
		nofile.Cur = min(65536, nofile.Max)
		_ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &nofile)
	}
	_ = syscall.Setrlimit(syscall.RLIMIT_CORE, &syscall.Rlimit{})
}

// CloseOnExec keeps descriptors that this process has inherited from its own
// commands.
func CloseOnExec() {
	entries, _ := os.ReadDir("/proc/self/fd")
	for _, e := range entries {
		if fd, err := strconv.Atoi(e.Name()); err == nil && fd > 2 {
			syscall.CloseOnExec(fd)
		}
	}
}

// PowerOff ends the machine. If the kernel cannot, process 1 ending does it.
func PowerOff() {
	syscall.Sync()
	_ = syscall.Mount("", "/", "", syscall.MS_REMOUNT|syscall.MS_RDONLY, "")
	_ = syscall.Reboot(syscall.LINUX_REBOOT_CMD_POWER_OFF)
	time.Sleep(time.Second)
	_ = syscall.Reboot(syscall.LINUX_REBOOT_CMD_RESTART)
}
