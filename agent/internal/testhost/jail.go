package testhost

import (
	"runtime"
	"syscall"
	"testing"
)

// Jail runs fn with dir as the root of the file system, this thread only: what
// a test feeds to a file server must not reach the files of the machine. fn
// must start no goroutines that touch files. It needs root.
func Jail(t testing.TB, dir string, fn func()) {
	t.Helper()
	if syscall.Getuid() != 0 {
		t.Skip("needs root")
	}
	done := make(chan error, 1)
	go func() {
		// Never unlocked: the thread ends with this goroutine.
		runtime.LockOSThread()
		var err error
		defer func() { done <- err }()
		if err = syscall.Unshare(syscall.CLONE_FS); err != nil {
			return
		}
		if err = syscall.Chroot(dir); err != nil {
			return
		}
		if err = syscall.Chdir("/"); err != nil {
			return
		}
		fn()
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}
