package wire

import (
	"strconv"
	"syscall"
)

var errnoNames = map[syscall.Errno]string{
	syscall.EPERM: "EPERM", syscall.ENOENT: "ENOENT", syscall.EIO: "EIO", syscall.ENXIO: "ENXIO",
	syscall.E2BIG: "E2BIG", syscall.ENOEXEC: "ENOEXEC", syscall.EBADF: "EBADF", syscall.EAGAIN: "EAGAIN",
	syscall.ENOMEM: "ENOMEM", syscall.EACCES: "EACCES", syscall.EBUSY: "EBUSY", syscall.EEXIST: "EEXIST",
	syscall.EXDEV: "EXDEV", syscall.ENODEV: "ENODEV", syscall.ENOTDIR: "ENOTDIR", syscall.EISDIR: "EISDIR",
	syscall.EINVAL: "EINVAL", syscall.ENFILE: "ENFILE", syscall.EMFILE: "EMFILE", syscall.ENOTTY: "ENOTTY",
	syscall.ETXTBSY: "ETXTBSY", syscall.EFBIG: "EFBIG", syscall.ENOSPC: "ENOSPC", syscall.EROFS: "EROFS",
	syscall.EMLINK: "EMLINK", syscall.EPIPE: "EPIPE", syscall.ENAMETOOLONG: "ENAMETOOLONG",
	syscall.ENOSYS: "ENOSYS", syscall.ENOTEMPTY: "ENOTEMPTY", syscall.ELOOP: "ELOOP",
	syscall.EOPNOTSUPP: "EOPNOTSUPP", syscall.EDQUOT: "EDQUOT", syscall.ESTALE: "ESTALE",
	syscall.ELIBBAD: "ELIBBAD",
}

// ErrnoName is the symbolic name of an error number, or "E" and the number.
func ErrnoName(no syscall.Errno) string {
	if s, ok := errnoNames[no]; ok {
		return s
	}
	return "E" + strconv.Itoa(int(no))
}

var signalNames = [...]string{
	1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS",
	8: "SIGFPE", 9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE",
	14: "SIGALRM", 15: "SIGTERM", 16: "SIGSTKFLT", 17: "SIGCHLD", 18: "SIGCONT", 19: "SIGSTOP",
	20: "SIGTSTP", 21: "SIGTTIN", 22: "SIGTTOU", 23: "SIGURG", 24: "SIGXCPU", 25: "SIGXFSZ",
	26: "SIGVTALRM", 27: "SIGPROF", 28: "SIGWINCH", 29: "SIGIO", 30: "SIGPWR", 31: "SIGSYS",
}

// SignalName is the symbolic name of a signal; real-time signals are counted
// from SIGRTMIN as the kernel numbers it.
func SignalName(s syscall.Signal) string {
	n := int(s)
	if n > 0 && n < len(signalNames) {
		return signalNames[n]
	}
	return "SIGRTMIN+" + strconv.Itoa(n-32)
}

// SignalNumber is the signal of a name, with or without SIG, or of a decimal
// number.
func SignalNumber(name string) (syscall.Signal, bool) {
	if n, err := strconv.Atoi(name); err == nil {
		return syscall.Signal(n), n >= 1 && n <= 64
	}
	for n, s := range signalNames {
		if s != "" && (s == name || s[3:] == name) {
			return syscall.Signal(n), true
		}
	}
	return 0, false
}
