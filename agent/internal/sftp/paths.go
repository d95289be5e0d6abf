package sftp

import (
	"errors"
	"os"
	"os/user"
	"path/filepath"
	"strings"
	"syscall"

	"cloche.dev/agent/internal/sys"
)

func (s *Server) opendir(id uint32, p *in) (bool, error) {
	path := p.string()
	if p.err != nil {
		return false, p.err
	}
	if len(s.handles) >= maxHandles {
		return false, syscall.EMFILE
	}
	fd, err := syscall.Open(path, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return false, err
	}
	return s.add(id, &handle{fd: fd, dir: true, path: path, list: []string{".", ".."}})
}

func (s *Server) readdir(id uint32, p *in) (bool, error) {
	h, err := s.find(p.string(), true)
	if err != nil {
		return false, err
	}
	// What vanishes meanwhile is left out, so it may take more than one round.
	for {
		if len(h.list) == 0 {
			n, err := syscall.ReadDirent(h.fd, s.entries[:])
			if err != nil {
				return false, err
			}
			if n == 0 {
				return false, errEnd
			}
			_, _, h.list = syscall.ParseDirent(s.entries[:n], -1, nil)
			continue
		}
		batch := h.list[:min(len(h.list), listBatch)]
		h.list = h.list[len(batch):]
		s.o.begin(fxpName, id).u32(0)
		count := uint32(0)
		for _, name := range batch {
			var st syscall.Stat_t
			if syscall.Lstat(filepath.Join(h.path, name), &st) != nil {
				continue
			}
			s.o.string(name).string(s.names.long(name, &st)).stat(&st)
			count++
		}
		if count > 0 {
			putCount(s.o.b, count)
			return true, nil
		}
	}
}

// putCount fills in how many names came.
func putCount(b []byte, n uint32) {
	b[9], b[10], b[11], b[12] = byte(n>>24), byte(n>>16), byte(n>>8), byte(n)
}

func (s *Server) name(id uint32, path string) (bool, error) {
	s.o.begin(fxpName, id).u32(1).string(path).string(path).u32(0)
	return true, nil
}

// realpath is the path without links, of which the last part need not exist.
func (s *Server) realpath(id uint32, path string) (bool, error) {
	if path == "" {
		path = "."
	}
	full, err := filepath.Abs(path)
	if err != nil {
		return false, err
	}
	real, err := filepath.EvalSymlinks(path)
	if err == nil {
		if real, err = filepath.Abs(real); err == nil {
			full = real
		}
		return s.name(id, full)
	}
	if !errors.Is(err, os.ErrNotExist) {
		return false, err
	}
	if dir, err := filepath.EvalSymlinks(filepath.Dir(full)); err == nil {
		full = filepath.Join(dir, filepath.Base(full))
	}
	return s.name(id, full)
}

func (s *Server) readlink(id uint32, path string) (bool, error) {
	to, err := os.Readlink(path)
	if err != nil {
		return false, err
	}
	return s.name(id, to)
}

// change carries out what is answered by a status only.
func (s *Server) change(typ byte, p *in) error {
	path := p.string()
	switch typ {
	case fxpRemove:
		return checked(p, func() error { return syscall.Unlink(path) })
	case fxpRmdir:
		return checked(p, func() error { return syscall.Rmdir(path) })
	case fxpMkdir:
		a := p.attrs()
		mode := uint32(0o777)
		if a.flags&attrMode != 0 {
			mode = a.mode & 0o7777
		}
		return checked(p, func() error { return syscall.Mkdir(path, mode) })
	case fxpRename:
		to := p.string()
		return checked(p, func() error { return renameNew(path, to) })
	case fxpSymlink:
		// OpenSSH sends what the link says first, and so do most.
		link := p.string()
		if s.plain {
			path, link = link, path
		}
		return checked(p, func() error { return syscall.Symlink(path, link) })
	}
	return errors.ErrUnsupported
}

func checked(p *in, fn func() error) error {
	if p.err != nil {
		return p.err
	}
	return fn()
}

// fdCWD stands for the present directory.
const fdCWD = -100

// renameNew renames to a name that is free: version 3 replaces nothing.
func renameNew(from, to string) error {
	err := sys.RenameatNoReplace(fdCWD, from, to)
	switch err {
	case syscall.EINVAL, syscall.ENOSYS: // a file system that cannot promise it
		var st syscall.Stat_t
		if syscall.Lstat(to, &st) == nil {
			return syscall.EEXIST
		}
		return syscall.Rename(from, to)
	}
	return err
}

func (s *Server) extended(id uint32, p *in) (bool, error) {
	switch p.string() {
	case "posix-rename@openssh.com":
		from, to := p.string(), p.string()
		return false, checked(p, func() error { return syscall.Rename(from, to) })
	case "hardlink@openssh.com":
		from, to := p.string(), p.string()
		return false, checked(p, func() error { return syscall.Link(from, to) })
	case "fsync@openssh.com":
		h, err := s.find(p.string(), false)
		if err != nil {
			return false, err
		}
		return false, syscall.Fsync(h.fd)
	case "lsetstat@openssh.com":
		path, a := p.string(), p.attrs()
		return false, checked(p, func() error { return a.apply(path, true) })
	case "statvfs@openssh.com":
		var st syscall.Statfs_t
		if err := syscall.Statfs(p.string(), &st); err != nil {
			return false, err
		}
		return s.statvfs(id, &st)
	case "fstatvfs@openssh.com":
		h := s.handles[p.string()]
		if h == nil {
			return false, syscall.EBADF
		}
		var st syscall.Statfs_t
		if err := syscall.Fstatfs(h.fd, &st); err != nil {
			return false, err
		}
		return s.statvfs(id, &st)
	case "limits@openssh.com":
		s.o.begin(fxpReply, id).u64(maxPacket).u64(maxData).u64(maxData).u64(maxHandles)
		return true, nil
	case "expand-path@openssh.com":
		path, err := expand(p.string())
		if err != nil {
			return false, err
		}
		return s.realpath(id, path)
	}
	return false, errors.ErrUnsupported
}

func (s *Server) statvfs(id uint32, st *syscall.Statfs_t) (bool, error) {
	s.o.begin(fxpReply, id).u64(uint64(st.Bsize)).u64(uint64(st.Frsize)).u64(st.Blocks).u64(st.Bfree).u64(st.Bavail)
	s.o.u64(st.Files).u64(st.Ffree).u64(st.Ffree)
	s.o.u64(uint64(uint32(st.Fsid.X__val[0])) | uint64(uint32(st.Fsid.X__val[1]))<<32)
	flags := uint64(0)
	if st.Flags&1 != 0 {
		flags |= 1
	}
	if st.Flags&2 != 0 {
		flags |= 2
	}
	s.o.u64(flags).u64(uint64(st.Namelen))
	return true, nil
}

// expand replaces ~ and ~user at the beginning.
func expand(path string) (string, error) {
	if !strings.HasPrefix(path, "~") {
		return path, nil
	}
	name, rest, _ := strings.Cut(path[1:], "/")
	if name == "" {
		return filepath.Join(os.Getenv("HOME"), rest), nil
	}
	u, err := user.Lookup(name)
	if err != nil {
		return "", os.ErrNotExist
	}
	return filepath.Join(u.HomeDir, rest), nil
}
