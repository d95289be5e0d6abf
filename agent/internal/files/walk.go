package files

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"syscall"

	"cloche.dev/agent/internal/sys"
)

const (
	// walkBatch is how many names of one directory are held, and sorted, at once.
	walkBatch = 4096
	// walkDepth bounds the descriptors that a walk holds, one for each level.
	walkDepth = 256
)

// errSkipDir makes a walk leave a directory out; errStopWalk ends it early.
var (
	errSkipDir  = errors.New("skip this directory")
	errStopWalk = errors.New("stop the walk")
)

// visit is one entry that a walk has come to. Its directory is open, so that
// what is done to it by its name there goes where the walk has gone.
type visit struct {
	dir   int
	name  string
	rel   string // below the root, "" for the root itself
	depth int
	st    syscall.Stat_t
}

func (v *visit) isDir() bool { return kind(v.st.Mode) == syscall.S_IFDIR }

// open opens a regular file for reading, and nothing else.
func (v *visit) open() (int, error) {
	return openRegularAt(v.dir, v.name)
}

func openRegularAt(dir int, name string) (int, error) {
	const flags = syscall.O_RDONLY | syscall.O_NOFOLLOW | syscall.O_NONBLOCK | syscall.O_NOCTTY | syscall.O_CLOEXEC
	fd, err := syscall.Openat(dir, name, flags, 0)
	if err != nil {
		return -1, err
	}
	var st syscall.Stat_t
	if err = syscall.Fstat(fd, &st); err == nil {
		err = regular(st.Mode)
	}
	if err != nil {
		_ = syscall.Close(fd)
		return -1, err
	}
	return fd, nil
}

// walker goes through a tree by descriptors. Links are entries, never followed
// (but the root is). File systems whose files the kernel makes up are not
// entered. It runs as the user.
type walker struct {
	ctx context.Context
	fn  func(v *visit) error
	// trouble is told of what cannot be entered or examined; nil ends the walk
	// with that error. It may return one that does.
	trouble func(rel string, err error) error
	// after is called when a directory is done, if it is set.
	after func(v *visit) error
}

// walk visits root and what is below it.
func (w *walker) walk(root string) error {
	fd, err := syscall.Open(root, sys.OPath|syscall.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer syscall.Close(fd)
	v := &visit{dir: fd, name: "."}
	if err := syscall.Fstat(fd, &v.st); err != nil {
		return err
	}
	if v.isDir() && isGenerated(fd) {
		return syscall.EINVAL
	}
	if !v.isDir() {
		// Where the links of the path have led to.
		real, err := readlink(sys.ProcFD(fd))
		if err != nil {
			return err
		}
		dir, base := split(real)
		if v.dir, err = syscall.Open(dir, sys.OPath|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0); err != nil {
			return err
		}
		defer syscall.Close(v.dir)
		v.name = base
		if err := sys.Fstatat(v.dir, base, &v.st, sys.AtNoFollow); err != nil {
			return err
		}
	}
	err = w.visit(v)
	if err == errStopWalk || err == errSkipDir {
		return nil
	}
	return err
}

func isGenerated(fd int) bool {
	var fs syscall.Statfs_t
	return syscall.Fstatfs(fd, &fs) == nil && generated[fs.Type]
}

func (w *walker) visit(v *visit) error {
	if err := w.ctx.Err(); err != nil {
		return err
	}
	if err := w.fn(v); err != nil {
		if err == errSkipDir && v.isDir() {
			return nil
		}
		return err
	}
	if !v.isDir() {
		return nil
	}
	err := w.enter(v)
	if err == nil && w.after != nil {
		err = w.after(v)
	}
	return err
}

func (w *walker) enter(v *visit) error {
	if v.depth >= walkDepth {
		return w.problem(v.rel, syscall.ENAMETOOLONG)
	}
	fd, err := syscall.Openat(v.dir, v.name, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0)
	if err != nil {
		if v.rel != "" && (err == syscall.ENOENT || err == syscall.ENOTDIR || err == syscall.ELOOP) {
			return nil // it has gone or changed meanwhile
		}
		return w.problem(v.rel, err)
	}
	defer syscall.Close(fd)
	for {
		names, err := someNames(fd, walkBatch)
		if err != nil {
			return w.problem(v.rel, err)
		}
		if len(names) == 0 {
			return nil
		}
		slices.Sort(names)
		for _, name := range names {
			if err := w.child(fd, v, name); err != nil {
				return err
			}
		}
	}
}

func (w *walker) child(fd int, parent *visit, name string) error {
	c := &visit{dir: fd, name: name, rel: name, depth: parent.depth + 1}
	if parent.rel != "" {
		c.rel = parent.rel + "/" + name
	}
	if err := sys.Fstatat(fd, name, &c.st, sys.AtNoFollow); err != nil {
		if err == syscall.ENOENT {
			return nil
		}
		return w.problem(c.rel, err)
	}
	if c.isDir() && c.st.Dev != parent.st.Dev {
		if d, err := syscall.Openat(fd, name, sys.OPath|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0); err == nil {
			made := isGenerated(d)
			_ = syscall.Close(d)
			if made {
				return nil
			}
		}
	}
	return w.visit(c)
}

func (w *walker) problem(rel string, err error) error {
	if w.trouble == nil {
		return err
	}
	return w.trouble(rel, err)
}

// someNames reads up to about most names from where the directory stands, none
// at its end.
func someNames(fd, most int) ([]string, error) {
	bp := dirBuffers.Get().(*[]byte)
	defer dirBuffers.Put(bp)
	var names []string
	for len(names) < most {
		n, err := syscall.ReadDirent(fd, *bp)
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			return names, err
		}
		if n <= 0 {
			break
		}
		eachName((*bp)[:n], func(raw []byte) { names = append(names, string(raw)) })
	}
	return names, nil
}

// eachName calls fn with each name in a buffer of getdents64 but "." and "..".
func eachName(b []byte, fn func([]byte)) {
	for len(b) > 0 {
		// linux_dirent64: inode 8, offset 8, length 2, type 1, name.
		const nameAt = 19
		size := int(binary.NativeEndian.Uint16(b[16:18]))
		name := b[nameAt:size]
		if i := bytes.IndexByte(name, 0); i >= 0 {
			name = name[:i]
		}
		b = b[size:]
		if s := string(name); s != "." && s != ".." {
			fn(name)
		}
	}
}
