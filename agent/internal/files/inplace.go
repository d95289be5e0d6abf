package files

import (
	"io"
	"syscall"

	"cloche.dev/agent/internal/sys"
	"cloche.dev/agent/internal/users"
)

// oTmpfile makes a file without a name.
const oTmpfile = 0x400000 | syscall.O_DIRECTORY

// writeInPlace is for appending, and for files whose directory the user may
// not write. All input is gathered first, so that an upload that is cut short
// changes nothing.
func (f *FS) writeInPlace(id *users.Identity, p *Put, t *target, body io.Reader, now *syscall.Stat_t) (int64, error) {
	spool, err := syscall.Open("/tmp", oTmpfile|syscall.O_RDWR|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		// Odd roots: whatever is writable.
		if spool, err = syscall.Open("/run", oTmpfile|syscall.O_RDWR|syscall.O_CLOEXEC, 0o600); err != nil {
			return 0, err
		}
	}
	defer syscall.Close(spool)
	n, err := fill(spool, body)
	if err != nil {
		return 0, err
	}
	if _, err := syscall.Seek(spool, 0, io.SeekStart); err != nil {
		return 0, err
	}
	f.settling.Lock()
	defer f.settling.Unlock()
	fd, err := openInPlace(id, p, t)
	if err != nil {
		return 0, err
	}
	defer syscall.Close(fd)
	if err := pour(fd, spool, p.Append); err != nil {
		return 0, err
	}
	if p.Mode != nil {
		if err := as(id, func() error { return syscall.Fchmod(fd, *p.Mode) }); err != nil {
			return 0, err
		}
	}
	if p.MtimeNS != nil {
		if err := sys.SetTimes(fd, *p.MtimeNS); err != nil {
			return n, err
		}
	}
	return n, syscall.Fstat(fd, now)
}

func openInPlace(id *users.Identity, p *Put, t *target) (fd int, err error) {
	flags := syscall.O_WRONLY | syscall.O_NONBLOCK | syscall.O_NOCTTY | syscall.O_CLOEXEC
	if p.Append {
		flags |= syscall.O_APPEND
	}
	if !t.exists {
		flags |= syscall.O_CREAT
	}
	if p.If.Absent {
		flags |= syscall.O_EXCL
	}
	err = as(id, func() error {
		fd, err = syscall.Open(t.path, flags, 0o644)
		if err == syscall.EEXIST && p.If.Absent {
			return p.If.check(true, nil)
		}
		return err
	})
	if err != nil {
		return -1, err
	}
	var st syscall.Stat_t
	if err = syscall.Fstat(fd, &st); err == nil {
		err = regular(st.Mode)
	}
	if err == nil && t.exists {
		err = p.If.check(true, &st)
	}
	if err == nil && !p.Append {
		// As the user: the kernel takes set-id bits away then.
		err = as(id, func() error { return syscall.Ftruncate(fd, 0) })
	}
	if err == nil {
		return fd, nil
	}
	_ = syscall.Close(fd)
	return -1, err
}

// pour copies the spooled bytes. An append that runs out of space takes its
// part back, unless somebody else has appended meanwhile.
func pour(fd, spool int, appended bool) error {
	var before syscall.Stat_t
	if err := syscall.Fstat(fd, &before); err != nil {
		return err
	}
	n, err := fill(fd, fdReader(spool))
	if err == nil || !appended {
		return err
	}
	var now syscall.Stat_t
	if syscall.Fstat(fd, &now) == nil && now.Size == before.Size+n {
		_ = syscall.Ftruncate(fd, before.Size)
	}
	return err
}

type fdReader int

func (f fdReader) Read(b []byte) (int, error) {
	for {
		n, err := syscall.Read(int(f), b)
		switch {
		case err == syscall.EINTR:
			continue
		case err != nil:
			return 0, err
		case n == 0:
			return 0, io.EOF
		}
		return n, nil
	}
}

func writeAll(fd int, b []byte) (int, error) {
	done := 0
	for done < len(b) {
		n, err := syscall.Write(fd, b[done:])
		if n > 0 {
			done += n
		}
		if err != nil && err != syscall.EINTR {
			return done, err
		}
	}
	return done, nil
}
