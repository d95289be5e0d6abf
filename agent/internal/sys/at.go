package sys

import (
	"strconv"
	"syscall"
	"unsafe"
)

// AtNoFollow looks at a link itself.
const AtNoFollow = 0x100

// Fstatat describes a name in an open directory.
func Fstatat(dir int, name string, st *syscall.Stat_t, flags int) error {
	p, err := syscall.BytePtrFromString(name)
	if err != nil {
		return err
	}
	_, _, no := syscall.Syscall6(syscall.SYS_NEWFSTATAT, uintptr(dir), uintptr(unsafe.Pointer(p)),
		uintptr(unsafe.Pointer(st)), uintptr(flags), 0, 0)
	return errno(no)
}

// Readlinkat is where a link in an open directory leads.
func Readlinkat(dir int, name string) (string, error) {
	p, err := syscall.BytePtrFromString(name)
	if err != nil {
		return "", err
	}
	var buf [syscall.PathMax]byte
	n, _, no := syscall.Syscall6(syscall.SYS_READLINKAT, uintptr(dir), uintptr(unsafe.Pointer(p)),
		uintptr(unsafe.Pointer(&buf[0])), uintptr(len(buf)), 0, 0)
	if no != 0 {
		return "", no
	}
	return string(buf[:n]), nil
}

// Faccessat checks a permission of a name in an open directory, as Access does.
func Faccessat(dir int, name string, mode uint32) error {
	p, err := syscall.BytePtrFromString(name)
	if err != nil {
		return err
	}
	_, _, no := syscall.Syscall6(sysFaccessat2, uintptr(dir), uintptr(unsafe.Pointer(p)), uintptr(mode),
		atEAccess|AtNoFollow, 0, 0)
	return errno(no)
}

// RenameatNoReplace renames within a directory unless the new name exists.
func RenameatNoReplace(dir int, from, to string) error {
	a, err := syscall.BytePtrFromString(from)
	if err != nil {
		return err
	}
	b, err := syscall.BytePtrFromString(to)
	if err != nil {
		return err
	}
	_, _, no := syscall.Syscall6(sysRenameat2, uintptr(dir), uintptr(unsafe.Pointer(a)),
		uintptr(dir), uintptr(unsafe.Pointer(b)), renameNoReplace, 0)
	return errno(no)
}

// ProcFD is a path to what an O_PATH descriptor stands for, which follows no
// link that somebody has put in its place.
func ProcFD(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

// Utimes sets the times of a path; follow looks through a link. Nil keeps one.
func Utimes(path string, atime, mtime int64, follow bool) error {
	p, err := syscall.BytePtrFromString(path)
	if err != nil {
		return err
	}
	ts := [2]syscall.Timespec{syscall.NsecToTimespec(atime), syscall.NsecToTimespec(mtime)}
	at, flags := atFDCWD, 0
	if !follow {
		flags = AtNoFollow
	}
	_, _, no := syscall.Syscall6(syscall.SYS_UTIMENSAT, uintptr(at), uintptr(unsafe.Pointer(p)),
		uintptr(unsafe.Pointer(&ts[0])), uintptr(flags), 0, 0)
	return errno(no)
}
