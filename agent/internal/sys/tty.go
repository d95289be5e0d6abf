package sys

import (
	"syscall"
	"unsafe"
)

const (
	tiocSetLock = 0x40045431 // TIOCSPTLCK
	tiocPeer    = 0x5441     // TIOCGPTPEER
	tiocSize    = 0x5414     // TIOCSWINSZ
)

// OpenPTY gives both ends of a new terminal. The user's end is opened through
// the other one, so that it does not matter what is mounted where.
func OpenPTY() (master, slave int, err error) {
	master, err = syscall.Open("/dev/ptmx", syscall.O_RDWR|syscall.O_NOCTTY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return -1, -1, err
	}
	var unlocked int32
	err = Ioctl(master, tiocSetLock, unsafe.Pointer(&unlocked))
	if err == nil {
		fd, _, no := syscall.Syscall(syscall.SYS_IOCTL, uintptr(master), tiocPeer,
			syscall.O_RDWR|syscall.O_NOCTTY|syscall.O_CLOEXEC)
		if no == 0 {
			return master, int(fd), nil
		}
		err = no
	}
	_ = syscall.Close(master)
	return -1, -1, err
}

// Resize sets the size of a terminal. Its foreground processes get SIGWINCH
// when it is another one than before.
func Resize(fd int, cols, rows uint16) error {
	size := [4]uint16{rows, cols, 0, 0}
	return Ioctl(fd, tiocSize, unsafe.Pointer(&size))
}

// Prlimit sets a resource limit of another process.
func Prlimit(pid, resource int, lim *syscall.Rlimit) error {
	_, _, no := syscall.Syscall6(sysPrlimit, uintptr(pid), uintptr(resource), uintptr(unsafe.Pointer(lim)), 0, 0, 0)
	return errno(no)
}

// Pidfd is a process, whatever becomes of its number.
type Pidfd int

// OpenPidfd gives a descriptor of the process that has this number now.
func OpenPidfd(pid int) (Pidfd, error) {
	fd, _, no := syscall.Syscall(sysPidfdOpen, uintptr(pid), 0, 0)
	return Pidfd(fd), errno(no)
}

// Signal sends a signal; a process that has ended is no error.
func (p Pidfd) Signal(s syscall.Signal) error {
	_, _, no := syscall.Syscall6(sysPidfdSend, uintptr(p), uintptr(s), 0, 0, 0, 0)
	if no == syscall.ESRCH {
		return nil
	}
	return errno(no)
}

// Close gives the descriptor back.
func (p Pidfd) Close() { _ = syscall.Close(int(p)) }
