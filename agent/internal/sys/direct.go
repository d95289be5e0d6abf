package sys

import (
	"syscall"
	"unsafe"
)

const (
	// DirectAfter is how large a file is that is written around the page
	// cache: in an emulated guest the cache costs as much as all else that an
	// upload does, and it would push out what programs are using.
	// Small files, which somebody will read soon, stay in it.
	DirectAfter = 1 << 20
	// directBlock is a multiple of the blocks of every disk.
	directBlock = 4096
)

// WholeBlocks is how many of so many bytes can be written around the cache.
func WholeBlocks[T int | int64](n T) T { return n &^ (directBlock - 1) }

// CanBeDirect says whether a buffer lies as writes around the cache want it.
func CanBeDirect(b []byte) bool {
	return uintptr(unsafe.Pointer(unsafe.SliceData(b)))%directBlock == 0
}

// SetDirect switches the page cache of an open file off or on. A file that is
// appended to keeps it: where a write will go is not known.
func SetDirect(fd int, direct bool) error {
	flags, _, no := syscall.Syscall(syscall.SYS_FCNTL, uintptr(fd), syscall.F_GETFL, 0)
	if no != 0 {
		return no
	}
	if flags&syscall.O_APPEND != 0 {
		return syscall.EINVAL
	}
	flags &^= syscall.O_DIRECT
	if direct {
		flags |= syscall.O_DIRECT
	}
	_, _, no = syscall.Syscall(syscall.SYS_FCNTL, uintptr(fd), syscall.F_SETFL, flags)
	return errno(no)
}
