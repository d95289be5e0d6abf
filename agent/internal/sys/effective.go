package sys

import "syscall"

// AsEffective runs fn with the effective identity of a user, this thread only:
// what AsUser does, and besides the kernel takes all other powers of root away,
// and tells whoever is connected to that it was this user (SO_PEERCRED). The
// real and saved ids stay those of root, which is how it comes back.
//
// A thread whose identity cannot be put back ends together with its goroutine.
func AsEffective(uid, gid uint32, groups []uint32, fn func() error) error {
	if uid == 0 && gid == 0 {
		return fn()
	}
	return onThread(func() (error, bool) { return asEffective(uid, gid, groups, fn) })
}

// unchanged is an id that setresuid(2) leaves as it is.
const unchanged = ^uintptr(0)

// asEffective also tells whether the thread is what it was.
func asEffective(uid, gid uint32, groups []uint32, fn func() error) (error, bool) {
	restored, err := threadGroups()
	if err != nil {
		return err, true
	}
	err = setGroups(groups)
	if err == nil {
		err = setEffective(syscall.SYS_SETRESGID, gid)
	}
	if err == nil {
		err = setEffective(syscall.SYS_SETRESUID, uid)
	}
	if err == nil {
		err = fn()
	}
	// The user first: only root may change the others.
	back := setEffective(syscall.SYS_SETRESUID, 0) == nil && setEffective(syscall.SYS_SETRESGID, 0) == nil &&
		setGroups(restored) == nil
	return err, back
}

// setEffective changes the effective id of this thread; the standard library's
// functions change all threads.
func setEffective(call uintptr, id uint32) error {
	if _, _, no := syscall.RawSyscall(call, unchanged, uintptr(id), unchanged); no != 0 {
		return no
	}
	return nil
}
