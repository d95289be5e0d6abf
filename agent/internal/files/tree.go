package files

import (
	"errors"
	"os"
	"strings"
	"syscall"

	"cloche.dev/agent/internal/sys"
	"cloche.dev/agent/internal/users"
	"cloche.dev/agent/internal/wire"
)

// Mkdir makes a directory and says whether it was new.
func (f *FS) Mkdir(id *users.Identity, path string, mode *uint32, parents bool) (e Entry, created bool, err error) {
	err = as(id, func() error {
		var err error
		created, err = mkdir(path, mode, parents)
		if err != nil {
			return err
		}
		e, err = f.stat(path, created)
		return err
	})
	if err != nil {
		return e, false, wire.FromErr(err, "path")
	}
	return e, created, nil
}

func mkdir(path string, mode *uint32, parents bool) (bool, error) {
	if parents {
		dir, _ := split(path)
		if err := makeParents(dir); err != nil {
			return false, err
		}
	}
	bits := uint32(0o755)
	if mode != nil {
		bits = *mode
	}
	err := syscall.Mkdir(strings.TrimRight(path, "/")+"/", bits)
	if err == nil {
		if mode != nil {
			// mkdir obeys the umask and knows no special bits.
			err = syscall.Chmod(path, bits)
		}
		return true, err
	}
	if err != syscall.EEXIST || !parents {
		return false, err
	}
	var st syscall.Stat_t
	if serr := syscall.Stat(path, &st); serr != nil {
		return false, err
	}
	if kind(st.Mode) != syscall.S_IFDIR {
		return false, syscall.ENOTDIR
	}
	return false, nil
}

// makeParents makes a directory and those above it, as far as they are missing.
func makeParents(dir string) error {
	var st syscall.Stat_t
	err := syscall.Stat(dir, &st)
	if err == nil && kind(st.Mode) != syscall.S_IFDIR {
		return syscall.ENOTDIR
	}
	if err != syscall.ENOENT {
		return err
	}
	above, base := split(dir)
	if base == "" {
		// "x/.." and the like: the kernel will say what it thinks of it.
		return nil
	}
	if err := makeParents(above); err != nil {
		return err
	}
	err = syscall.Mkdir(dir, 0o755)
	if err == syscall.EEXIST {
		return nil
	}
	return err
}

// Remove deletes a file, an empty directory, or with recursive a whole tree.
// Links are removed, not followed.
func (f *FS) Remove(id *users.Identity, path string, recursive bool) error {
	if _, base := split(path); base == "" {
		return wire.BadRequest("path", "this directory can't be removed by this name")
	}
	path = strings.TrimRight(path, "/")
	err := as(id, func() error {
		var st syscall.Stat_t
		if err := syscall.Lstat(path, &st); err != nil {
			return err
		}
		if kind(st.Mode) != syscall.S_IFDIR {
			return syscall.Unlink(path)
		}
		if !recursive {
			return syscall.Rmdir(path)
		}
		// It goes from directory to directory by descriptors, so that a link
		// put there meanwhile can't lead it elsewhere.
		return os.RemoveAll(path)
	})
	if err != nil {
		return wire.FromErr(err, "path")
	}
	return nil
}

// Move renames; across file systems it copies and then removes.
func (f *FS) Move(id *users.Identity, from, to string, overwrite bool) (Entry, error) {
	var e Entry
	field := "path"
	err := as(id, func() error {
		var st syscall.Stat_t
		if err := syscall.Lstat(from, &st); err != nil {
			return err
		}
		if dir, _ := split(to); syscall.Stat(dir, &st) == syscall.ENOENT {
			field = "to"
			return syscall.ENOENT
		}
		err := rename(from, to, overwrite)
		if errors.Is(err, syscall.EXDEV) {
			err = moveAcross(from, to, overwrite)
		}
		if err != nil {
			return err
		}
		e, err = f.stat(to, false)
		return err
	})
	if errors.Is(err, syscall.EEXIST) {
		field = "to"
	}
	if err != nil {
		return e, wire.FromErr(err, field)
	}
	return e, nil
}

func rename(from, to string, overwrite bool) error {
	if overwrite {
		return syscall.Rename(from, to)
	}
	err := sys.RenameNoReplace(from, to)
	if err != syscall.EINVAL && err != syscall.ENOSYS {
		return err
	}
	// Some file systems cannot do it in one step.
	var st syscall.Stat_t
	if syscall.Lstat(to, &st) == nil {
		return syscall.EEXIST
	}
	return syscall.Rename(from, to)
}
