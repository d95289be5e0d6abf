package sys

import (
	"runtime"
	"syscall"
	"time"
	"unsafe"
)

// Numbers that package syscall does not know.
const (
	sysFaccessat2  = 439
	sysFinitModule = 313
	sysRenameat2   = 316

	atFDCWD         = -0x64
	atEAccess       = 0x200
	renameNoReplace = 1
	fionread        = 0x541b
	sysPidfdSend    = 424
	sysPidfdOpen    = 434
	sysPrlimit      = 302

	// OPath opens a name without opening what it stands for.
	OPath = 0x200000
	// WOK asks for write permission, ROK for read, XOK for execute or search.
	WOK = 2
	ROK = 4
	XOK = 1
)

// Access checks a permission with the identity of this thread as AsUser has
// set it (access(2) would look at the real user).
func Access(path string, mode uint32) error {
	p, err := syscall.BytePtrFromString(path)
	if err != nil {
		return err
	}
	at := atFDCWD
	_, _, no := syscall.Syscall6(sysFaccessat2, uintptr(at), uintptr(unsafe.Pointer(p)), uintptr(mode), atEAccess, 0, 0)
	return errno(no)
}

// RenameNoReplace renames unless the new name exists.
func RenameNoReplace(from, to string) error {
	a, err := syscall.BytePtrFromString(from)
	if err != nil {
		return err
	}
	b, err := syscall.BytePtrFromString(to)
	if err != nil {
		return err
	}
	at := atFDCWD
	_, _, no := syscall.Syscall6(sysRenameat2, uintptr(at), uintptr(unsafe.Pointer(a)),
		uintptr(at), uintptr(unsafe.Pointer(b)), renameNoReplace, 0)
	return errno(no)
}

// InitModule loads the kernel module that is open at fd.
func InitModule(fd int, params string) error {
	p, err := syscall.BytePtrFromString(params)
	if err != nil {
		return err
	}
	_, _, no := syscall.Syscall(sysFinitModule, uintptr(fd), uintptr(unsafe.Pointer(p)), 0)
	return errno(no)
}

// Readable is the number of bytes that wait in a pipe.
func Readable(fd int) (int, error) {
	var n int32
	_, _, no := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), fionread, uintptr(unsafe.Pointer(&n)))
	return int(n), errno(no)
}

// Ioctl is ioctl(2) with a pointer argument.
func Ioctl(fd int, request uintptr, arg unsafe.Pointer) error {
	_, _, no := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), request, uintptr(arg))
	return errno(no)
}

// IoctlInt is ioctl(2) with a plain argument.
func IoctlInt(fd int, request, arg uintptr) error {
	_, _, no := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), request, arg)
	return errno(no)
}

// SpliceAway moves up to n bytes from a pipe into sink, which should be
// /dev/null, without copying them.
func SpliceAway(pipe, sink, n int) (int, error) {
	const nonBlock = 2
	k, err := syscall.Splice(pipe, nil, sink, nil, n, nonBlock)
	return int(k), err
}

// PeekExited is waitid(P_ALL, WEXITED|WNOHANG|WNOWAIT): the id of a child that
// has ended and not been reaped, 0 if there is none, ECHILD without children.
func PeekExited() (int, error) {
	const (
		pAll    = 0
		wNoHang = 1
		wExited = 4
		wNoWait = 0x1000000
	)
	var info [128]byte
	_, _, no := syscall.Syscall6(syscall.SYS_WAITID, pAll, 0, uintptr(unsafe.Pointer(&info[0])),
		wExited|wNoHang|wNoWait, 0, 0)
	if no != 0 {
		return 0, no
	}
	// siginfo_t: signo, errno, code, padding, and then the pid.
	return int(*(*int32)(unsafe.Pointer(&info[16]))), nil
}

// ClockBoot is the time since boot in nanoseconds, suspended time included.
func ClockBoot() int64 {
	const clockBoottime = 7
	var ts syscall.Timespec
	_, _, _ = syscall.Syscall(syscall.SYS_CLOCK_GETTIME, clockBoottime, uintptr(unsafe.Pointer(&ts)), 0)
	return ts.Nano()
}

// SetClock sets the wall clock.
func SetClock(ns int64) error {
	const clockRealtime = 0
	ts := syscall.NsecToTimespec(ns)
	_, _, no := syscall.Syscall(syscall.SYS_CLOCK_SETTIME, clockRealtime, uintptr(unsafe.Pointer(&ts)), 0)
	return errno(no)
}

const (
	// UsualSlack is how far the kernel puts off the timers of a thread.
	UsualSlack = 50 * time.Microsecond
	// MonitorSlack is that of the monitor thread of Go's runtime. While
	// anything runs it wakes up every 20 µs, to look for goroutines that are
	// stuck in system calls, and each time interrupts what runs.
	MonitorSlack = 20 * time.Millisecond
)

// SetSlack gives this thread, and so its children, the precision of their
// timers.
func SetSlack(slack time.Duration) {
	const prSetTimerSlack = 29
	_, _, _ = syscall.RawSyscall(syscall.SYS_PRCTL, prSetTimerSlack, uintptr(slack), 0)
}

// Batch keeps this goroutine's thread from interrupting whoever wakes it: it
// goes on when the other one waits, and finds more to do at once.
func Batch() {
	runtime.LockOSThread()
	const schedBatch = 3
	var priority int32
	_, _, _ = syscall.RawSyscall(syscall.SYS_SCHED_SETSCHEDULER, 0, schedBatch, uintptr(unsafe.Pointer(&priority)))
}

// WidenPipe lets a pipe hold more. Where that is not allowed it stays as it is.
func WidenPipe(fd, size int) {
	const setPipeSize = 1031
	_, _, _ = syscall.RawSyscall(syscall.SYS_FCNTL, uintptr(fd), setPipeSize, uintptr(size))
}

// WidenSocket lets a socket send more than the other end has read.
func WidenSocket(fd, size int) {
	_ = syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_SNDBUFFORCE, size)
}

// SetNonblock sets O_NONBLOCK and no other status flag.
func SetNonblock(fd int) error {
	_, _, no := syscall.RawSyscall(syscall.SYS_FCNTL, uintptr(fd), syscall.F_SETFL, syscall.O_NONBLOCK)
	return errno(no)
}

// Subreaper makes this process the parent of its orphaned descendants, as
// process 1 is by birth.
func Subreaper() error {
	const prSetChildSubreaper = 36
	_, _, no := syscall.Syscall(syscall.SYS_PRCTL, prSetChildSubreaper, 1, 0)
	return errno(no)
}

// SetTimes sets the modification time of an open file; the access time becomes
// the same.
func SetTimes(fd int, ns int64) error {
	ts := [2]syscall.Timespec{syscall.NsecToTimespec(ns), syscall.NsecToTimespec(ns)}
	_, _, no := syscall.Syscall6(syscall.SYS_UTIMENSAT, uintptr(fd), 0, uintptr(unsafe.Pointer(&ts[0])), 0, 0, 0)
	return errno(no)
}

func errno(no syscall.Errno) error {
	if no != 0 {
		return no
	}
	return nil
}
