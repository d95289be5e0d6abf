// Package sys holds the system calls that the standard library lacks.
package sys

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"syscall"
	"unsafe"
)

// AsUser runs fn with the file-system identity of a user: fsuid, fsgid and
// supplementary groups of this thread only. The kernel takes the powers of
// root over files away for that time and gives them back with fsuid 0.
//
// A thread whose identity cannot be put back must never run anything else:
// it stays locked and ends together with its goroutine.
func AsUser(uid, gid uint32, groups []uint32, fn func() error) error {
	if uid == 0 && gid == 0 {
		return fn()
	}
	return onThread(func() (error, bool) { return asUser(uid, gid, groups, fn) })
}

// onThread runs fn on a thread that nobody else has meanwhile. It tells whether
// the thread is what it was; one that is not ends with it.
func onThread(fn func() (error, bool)) error {
	done := make(chan error, 1)
	go func() {
		defer func() {
			// Nobody else would catch it, and process 1 must not die.
			if v := recover(); v != nil {
				done <- fmt.Errorf("panic: %v\n%s", v, debug.Stack())
			}
		}()
		runtime.LockOSThread()
		err, back := fn()
		if back {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// asUser also tells whether the thread is what it was.
func asUser(uid, gid uint32, groups []uint32, fn func() error) (error, bool) {
	restored, err := threadGroups()
	if err != nil {
		return err, false
	}
	if err := setGroups(groups); err != nil {
		return err, false
	}
	setFS(syscall.SYS_SETFSGID, gid)
	setFS(syscall.SYS_SETFSUID, uid)
	if fsID(syscall.SYS_SETFSUID) != uid || fsID(syscall.SYS_SETFSGID) != gid {
		return syscall.EPERM, false
	}
	err = fn()
	setFS(syscall.SYS_SETFSUID, 0)
	setFS(syscall.SYS_SETFSGID, 0)
	return err, setGroups(restored) == nil && fsID(syscall.SYS_SETFSUID) == 0 && fsID(syscall.SYS_SETFSGID) == 0
}

// threadGroups are the supplementary groups of this thread.
func threadGroups() ([]uint32, error) {
	old, err := syscall.Getgroups()
	if err != nil {
		return nil, err
	}
	groups := make([]uint32, len(old))
	for i, g := range old {
		groups[i] = uint32(g)
	}
	return groups, nil
}

// setGroups changes the groups of this thread; the standard library's
// function of that name changes all threads.
func setGroups(groups []uint32) error {
	var p unsafe.Pointer
	if len(groups) > 0 {
		p = unsafe.Pointer(&groups[0])
	}
	_, _, no := syscall.RawSyscall(syscall.SYS_SETGROUPS, uintptr(len(groups)), uintptr(p), 0)
	if no != 0 {
		return no
	}
	return nil
}

func setFS(call uintptr, id uint32) {
	_, _, _ = syscall.RawSyscall(call, uintptr(id), 0, 0)
}

// fsID asks for the current value: an impossible id changes nothing.
func fsID(call uintptr) uint32 {
	old, _, _ := syscall.RawSyscall(call, ^uintptr(0), 0, 0)
	return uint32(old)
}
