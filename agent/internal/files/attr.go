package files

import (
	"context"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"cloche.dev/agent/internal/sys"
	"cloche.dev/agent/internal/users"
	"cloche.dev/agent/internal/wire"
)

// Attributes are what is to be changed of a path, nil for what stays.
type Attributes struct {
	Mode      *uint32
	UID, GID  *uint32
	MtimeNS   *int64
	Recursive bool
}

// SetAttributes changes mode, owner, group and time of a path, with Recursive
// of all below it. Of a link the owner is changed, and nothing else. It says how
// many entries it has changed.
func (f *FS) SetAttributes(ctx context.Context, id *users.Identity, path string, a *Attributes) (n int64, e Entry, err error) {
	err = as(id, func() error {
		w := &walker{ctx: ctx}
		w.fn = func(v *visit) error {
			if !v.isDir() {
				n++
				return a.apply(v)
			}
			if !a.Recursive {
				n++
				if err := a.apply(v); err != nil {
					return err
				}
				return errSkipDir
			}
			return nil
		}
		// A directory comes behind what it holds: its new mode or owner may close it.
		w.after = func(v *visit) error {
			n++
			return a.apply(v)
		}
		var st syscall.Stat_t
		if err := syscall.Lstat(path, &st); err != nil {
			return err
		}
		if err := w.walk(path); err != nil {
			return err
		}
		var err error
		e, err = f.stat(path, true)
		return err
	})
	if err != nil {
		return n, e, wire.FromErr(err, "path")
	}
	return n, e, nil
}

func (a *Attributes) apply(v *visit) error {
	fd, err := syscall.Openat(v.dir, v.name, sys.OPath|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer syscall.Close(fd)
	var st syscall.Stat_t
	if err := syscall.Fstat(fd, &st); err != nil {
		return err
	}
	link := kind(st.Mode) == syscall.S_IFLNK
	if a.UID != nil || a.GID != nil {
		uid, gid := -1, -1
		if a.UID != nil {
			uid = int(*a.UID)
		}
		if a.GID != nil {
			gid = int(*a.GID)
		}
		const emptyPath = 0x1000
		if err := syscall.Fchownat(fd, "", uid, gid, emptyPath|sys.AtNoFollow); err != nil {
			return err
		}
	}
	if link {
		return nil
	}
	if a.Mode != nil {
		if err := syscall.Chmod(sys.ProcFD(fd), *a.Mode); err != nil {
			return err
		}
	}
	if a.MtimeNS != nil {
		return sys.Utimes(sys.ProcFD(fd), *a.MtimeNS, *a.MtimeNS, true)
	}
	return nil
}

// Touch makes an empty file unless there is something, and sets its time: now,
// if none is given.
func (f *FS) Touch(id *users.Identity, path string, mtime *int64, parents bool) (e Entry, created bool, err error) {
	err = as(id, func() error {
		if dir, _ := split(path); parents {
			if err := makeParents(dir); err != nil {
				return err
			}
		}
		const flags = syscall.O_WRONLY | syscall.O_CREAT | syscall.O_EXCL | syscall.O_NOCTTY | syscall.O_CLOEXEC
		fd, err := syscall.Open(path, flags, 0o644)
		switch {
		case err == nil:
			created = true
			_ = syscall.Close(fd)
		case err != syscall.EEXIST && err != syscall.EISDIR:
			return err
		}
		ns := time.Now().UnixNano()
		if mtime != nil {
			ns = *mtime
		}
		if !created || mtime != nil {
			if err := sys.Utimes(path, ns, ns, true); err != nil {
				return err
			}
		}
		e, err = f.stat(path, true)
		return err
	})
	if err != nil {
		return e, false, wire.FromErr(err, "path")
	}
	return e, created, nil
}

// Link makes a symbolic link with the text target, or another name for the file
// at target.
func (f *FS) Link(id *users.Identity, path, target string, hard, overwrite, parents bool) (Entry, error) {
	var e Entry
	field := "path"
	err := as(id, func() error {
		dir, base := split(path)
		if base == "" || strings.HasSuffix(path, "/") {
			return syscall.EISDIR
		}
		if parents {
			if err := makeParents(dir); err != nil {
				return err
			}
		}
		name := path
		if overwrite {
			name = join(dir, temporaryName())
		}
		var err error
		if hard {
			if err = syscall.Link(target, name); err == syscall.ENOENT {
				var st syscall.Stat_t
				if syscall.Lstat(target, &st) != nil {
					field = "to"
				}
			}
		} else {
			err = syscall.Symlink(target, name)
		}
		if err != nil {
			return err
		}
		if overwrite {
			err = syscall.Rename(name, path)
			_ = syscall.Unlink(name) // is there after a failure, or when both were one file
			if err != nil {
				return err
			}
		}
		e, err = f.stat(path, false)
		return err
	})
	if err != nil {
		return e, wire.FromErr(err, field)
	}
	return e, nil
}

// Readlink is the raw text of a link.
func (f *FS) Readlink(id *users.Identity, path string) (string, error) {
	var target string
	err := as(id, func() (err error) {
		var st syscall.Stat_t
		if err = syscall.Lstat(path, &st); err != nil {
			return err
		}
		if kind(st.Mode) != syscall.S_IFLNK {
			return wire.Conflict("not_a_link", "path", "it is not a symbolic link")
		}
		target, err = readlink(path)
		return err
	})
	if err != nil {
		return "", wire.FromErr(err, "path")
	}
	return target, nil
}

// Disk is what a file system holds.
type Disk struct {
	Path      string `json:"path"`
	Bytes     uint64 `json:"bytes"`
	Used      uint64 `json:"used_bytes"`
	Available uint64 `json:"available_bytes"`
	Files     uint64 `json:"files"`
	FilesFree uint64 `json:"files_free"`
	ReadOnly  bool   `json:"read_only"`
}

// Df describes the file system at a path.
func (f *FS) Df(id *users.Identity, path string) (*Disk, error) {
	var fs syscall.Statfs_t
	if err := as(id, func() error { return syscall.Statfs(path, &fs) }); err != nil {
		return nil, wire.FromErr(err, "path")
	}
	size := uint64(fs.Bsize)
	return &Disk{
		Path: text(path), Bytes: fs.Blocks * size, Used: (fs.Blocks - fs.Bfree) * size, Available: fs.Bavail * size,
		Files: fs.Files, FilesFree: fs.Ffree, ReadOnly: fs.Flags&syscall.MS_RDONLY != 0,
	}, nil
}

// Use is what a tree takes up. Bytes counts content, DiskBytes blocks.
type Use struct {
	Path      string `json:"path"`
	PathB64   string `json:"path_b64,omitempty"`
	Bytes     int64  `json:"bytes"`
	DiskBytes int64  `json:"disk_bytes"`
	Entries   int64  `json:"entries"`
	depth     int
}

// Usage is a tree and its parts down to a depth.
type Usage struct {
	Use
	Parts      []*Use `json:"parts"`
	Truncated  bool   `json:"truncated"`
	Unreadable int64  `json:"unreadable"`
}

const (
	maxParts = 10_000
	// maxLinked is how many files with several names are remembered, so as to
	// count, or to pack, each once.
	maxLinked = 100_000
)

type inode struct{ dev, ino uint64 }

// Du adds up a tree. A file with several names counts once.
func (f *FS) Du(ctx context.Context, id *users.Identity, path string, depth int) (*Usage, error) {
	u := &Usage{Use: Use{Path: text(path)}, Parts: []*Use{}}
	open := []*Use{&u.Use}
	seen := map[inode]bool{}
	w := &walker{ctx: ctx, trouble: func(string, error) error { u.Unreadable++; return nil }}
	w.fn = func(v *visit) error {
		if v.isDir() && v.depth > 0 && v.depth <= depth {
			if len(u.Parts) >= maxParts {
				u.Truncated = true
			} else {
				one := &Use{depth: v.depth}
				one.Path, one.PathB64 = exact(filepath.Join(path, v.rel))
				u.Parts = append(u.Parts, one)
				open = append(open, one)
			}
		}
		if !v.isDir() && v.st.Nlink > 1 {
			key := inode{v.st.Dev, v.st.Ino}
			if seen[key] {
				return nil
			}
			if len(seen) < maxLinked {
				seen[key] = true
			}
		}
		for _, one := range open {
			one.Entries++
			one.DiskBytes += v.st.Blocks * 512
			if !v.isDir() {
				one.Bytes += v.st.Size
			}
		}
		return nil
	}
	w.after = func(v *visit) error {
		if top := open[len(open)-1]; v.depth > 0 && top.depth == v.depth {
			open = open[:len(open)-1]
		}
		return nil
	}
	if err := as(id, func() error { return w.walk(path) }); err != nil {
		return nil, wire.FromErr(err, "path")
	}
	return u, nil
}
