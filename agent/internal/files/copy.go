package files

import (
	"crypto/rand"
	"encoding/hex"
	"os"
	"path/filepath"
	"syscall"
)

// moveAcross copies a tree to a temporary name beside the new one, renames it,
// and removes the old one. It runs as the user.
func moveAcross(from, to string, overwrite bool) error {
	dir, _ := split(to)
	var random [8]byte
	_, _ = rand.Read(random[:])
	tmp := join(dir, "."+hex.EncodeToString(random[:])+".cloche-tmp")
	err := copyTree(from, tmp)
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
func copyTree(from, to string) error {
	var st syscall.Stat_t
	if err := syscall.Lstat(from, &st); err != nil {
		return err
	}
	var err error
	switch kind(st.Mode) {
	case syscall.S_IFREG:
		err = copyFile(from, to)
	case syscall.S_IFLNK:
		var t string
		if t, err = readlink(from); err == nil {
			err = syscall.Symlink(t, to)
		}
	case syscall.S_IFDIR:
		err = copyDir(from, to)
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

func copyDir(from, to string) error {
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
		err = copyTree(filepath.Join(from, n), filepath.Join(to, n))
	}
	return err
}

func copyFile(from, to string) error {
	in, err := syscall.Open(from, syscall.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer syscall.Close(in)
	out, err := syscall.Open(to, syscall.O_WRONLY|syscall.O_CREAT|syscall.O_EXCL|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	_, err = fill(out, fdReader(in))
	if cerr := syscall.Close(out); err == nil {
		err = cerr
	}
	return err
}
