package files

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"cloche.dev/agent/internal/users"
	"cloche.dev/agent/internal/wire"
)

const atCWD = -0x64

// moveAcross copies a tree to a temporary name beside the new one, renames it,
// and removes the old one. It runs as the user.
func moveAcross(from, to string, overwrite bool) error {
	dir, _ := split(to)
	tmp := join(dir, temporaryName())
	err := copyTree(context.Background(), from, tmp)
	if err == nil {
		err = rename(tmp, to, overwrite)
	}
	if err != nil {
		_ = os.RemoveAll(tmp)
		return err
	}
	return os.RemoveAll(from)
}

// copyTree copies files, directories, links, FIFOs and device nodes with
// their mode, times and, where the user may, owner.
func copyTree(ctx context.Context, from, to string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	var st syscall.Stat_t
	if err := syscall.Lstat(from, &st); err != nil {
		return err
	}
	var err error
	switch kind(st.Mode) {
	case syscall.S_IFREG:
		err = copyFile(ctx, from, to)
	case syscall.S_IFLNK:
		var t string
		if t, err = readlink(from); err == nil {
			err = syscall.Symlink(t, to)
		}
	case syscall.S_IFDIR:
		err = copyDir(ctx, from, to)
	case syscall.S_IFSOCK:
		return nil // it would have no listener
	default:
		err = syscall.Mknod(to, st.Mode, int(st.Rdev))
	}
	if err != nil {
		return err
	}
	return copyAttributes(to, &st)
}

func copyAttributes(to string, st *syscall.Stat_t) error {
	_ = syscall.Lchown(to, int(st.Uid), int(st.Gid))
	if kind(st.Mode) == syscall.S_IFLNK {
		return nil
	}
	if err := syscall.Chmod(to, st.Mode&0o7777); err != nil {
		return err
	}
	ts := [2]syscall.Timespec{st.Atim, st.Mtim}
	return syscall.UtimesNano(to, ts[:])
}

func copyDir(ctx context.Context, from, to string) error {
	if err := syscall.Mkdir(to, 0o700); err != nil {
		return err
	}
	fd, err := syscall.Open(from, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	var names []string
	err = readNames(fd, func(n []byte) { names = append(names, string(n)) })
	_ = syscall.Close(fd)
	for _, n := range names {
		if err != nil {
			break
		}
		err = copyTree(ctx, filepath.Join(from, n), filepath.Join(to, n))
	}
	return err
}

func copyFile(ctx context.Context, from, to string) error {
	in, err := openRegularAt(atCWD, from)
	if err != nil {
		return err
	}
	defer syscall.Close(in)
	out, err := syscall.Open(to, syscall.O_WRONLY|syscall.O_CREAT|syscall.O_EXCL|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	err = fillSparse(ctx, out, in)
	if cerr := syscall.Close(out); err == nil {
		err = cerr
	}
	return err
}

// fillSparse copies the data of a file; its holes stay holes.
func fillSparse(ctx context.Context, out, in int) error {
	const seekData, seekHole = 3, 4
	var st syscall.Stat_t
	if err := syscall.Fstat(in, &st); err != nil {
		return err
	}
	at := int64(0)
	for at < st.Size {
		data, err := syscall.Seek(in, at, seekData)
		if err == syscall.ENXIO {
			break // a hole up to the end
		}
		if err != nil {
			data = at
		}
		hole, err := syscall.Seek(in, data, seekHole)
		if err != nil {
			hole = st.Size
		}
		if _, err := syscall.Seek(in, data, io.SeekStart); err != nil {
			return err
		}
		if _, err := syscall.Seek(out, data, io.SeekStart); err != nil {
			return err
		}
		if _, err := fill(out, io.LimitReader(ctxReader{ctx, fdReader(in)}, hole-data)); err != nil {
			return err
		}
		at = hole
	}
	return syscall.Ftruncate(out, st.Size)
}

// ctxReader ends when nobody wants the bytes any more.
type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

func (c ctxReader) Read(b []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(b)
}

// Copy copies a file, or with recursive a tree: links stay links, modes and times
// are kept, and owners where the user may give files away. What is there is
// replaced in one step, and only with overwrite.
func (f *FS) Copy(ctx context.Context, id *users.Identity, from, to string, overwrite, recursive bool) (Entry, error) {
	var e Entry
	field := "path"
	err := as(id, func() error {
		var st, above syscall.Stat_t
		if err := syscall.Lstat(from, &st); err != nil {
			return err
		}
		dir, base := split(to)
		if base == "" {
			field = "to"
			return syscall.EISDIR
		}
		if kind(st.Mode) == syscall.S_IFDIR {
			if !recursive {
				return syscall.EISDIR
			}
			if err := outside(dir, &st); err != nil {
				return err
			}
		}
		if err := syscall.Stat(dir, &above); err != nil {
			field = "to"
			return err
		}
		if !overwrite && syscall.Lstat(to, &above) == nil {
			field = "to"
			return syscall.EEXIST
		}
		tmp := join(dir, temporaryName())
		err := copyTree(ctx, from, tmp)
		if err == nil {
			if err = rename(tmp, strings.TrimRight(to, "/"), overwrite); err != nil {
				field = "to"
			}
		}
		if err != nil {
			_ = os.RemoveAll(tmp)
			return err
		}
		e, err = f.stat(strings.TrimRight(to, "/"), false)
		return err
	})
	if err != nil {
		return e, wire.FromErr(err, field)
	}
	return e, nil
}

// outside refuses a directory that is, or is below, the one that st describes.
func outside(dir string, st *syscall.Stat_t) error {
	var last syscall.Stat_t
	for range syscall.PathMax {
		var one syscall.Stat_t
		if err := syscall.Stat(dir, &one); err != nil {
			return nil // the copy itself will say so
		}
		if one.Dev == st.Dev && one.Ino == st.Ino {
			return wire.BadRequest("to", "a directory can't be copied into itself")
		}
		if one.Dev == last.Dev && one.Ino == last.Ino {
			return nil
		}
		last, dir = one, dir+"/.."
	}
	return nil
}
