package sys

import (
	"io"
	"syscall"
	"unsafe"
)

// Raw is an open file that is read and written without a word to the runtime. A
// program that does one thing after the other has nothing else to run
// meanwhile, and starts no thread to look.
type Raw int

func (f Raw) Read(b []byte) (int, error) {
	n, err := f.call(syscall.SYS_READ, b)
	if n == 0 && err == nil && len(b) > 0 {
		err = io.EOF
	}
	return n, err
}

func (f Raw) Write(b []byte) (int, error) {
	done := 0
	for done < len(b) {
		n, err := f.call(syscall.SYS_WRITE, b[done:])
		if err != nil {
			return done, err
		}
		done += n
	}
	return done, nil
}

func (f Raw) call(number uintptr, b []byte) (int, error) {
	for {
		n, _, no := syscall.RawSyscall(number, uintptr(f), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
		if no == syscall.EINTR {
			continue
		}
		if no != 0 {
			return 0, no
		}
		return int(n), nil
	}
}
