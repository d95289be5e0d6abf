package files

import (
	"archive/zip"
	"io"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"cloche.dev/agent/internal/sys"
	"cloche.dev/agent/internal/wire"
)

// maxZipDirectory bounds the list of entries of a zip archive, which is held in
// memory.
const maxZipDirectory = 8 << 20

// setTimes sets both times of an open file.
func setTimes(f *os.File, t time.Time) error { return sys.SetTimes(int(f.Fd()), t.UnixNano()) }

// zip needs its end before its beginning, so it is gathered first, in a file
// without a name on the disk that it is for.
func (x *extraction) zip(body io.Reader) error {
	spool, err := x.spool()
	if err != nil {
		return err
	}
	defer spool.Close()
	size, err := fill(int(spool.Fd()), ctxReader{x.ctx, body})
	if err != nil {
		return broken(err)
	}
	in := &boundedReader{r: spool}
	in.left.Store(maxZipDirectory + 128<<10)
	z, err := zip.NewReader(in, size)
	if in.left.Load() < 0 {
		return wire.TooLarge("body", "the archive has a longer list of entries than can be read; take tar")
	}
	if z == nil {
		return noFormat()
	}
	in.left.Store(1 << 62)
	for _, f := range z.File {
		if err := x.zipEntry(f); err != nil {
			return err
		}
	}
	return nil
}

func (x *extraction) spool() (*os.File, error) {
	for _, dir := range []string{x.r.Path, "/tmp"} {
		fd, err := syscall.Open(dir, oTmpfile|syscall.O_RDWR|syscall.O_CLOEXEC, 0o600)
		if err == nil {
			return os.NewFile(uintptr(fd), "spool"), nil
		}
		if err == syscall.ENOSPC || err == syscall.EDQUOT {
			return nil, err
		}
	}
	return nil, syscall.EACCES
}

// boundedReader stops a directory that has no end.
type boundedReader struct {
	r    io.ReaderAt
	left atomic.Int64
}

func (b *boundedReader) ReadAt(p []byte, at int64) (int, error) {
	if b.left.Add(-int64(len(p))) < 0 {
		return 0, io.ErrUnexpectedEOF
	}
	return b.r.ReadAt(p, at)
}

func (x *extraction) zipEntry(f *zip.File) error {
	name, ok, err := x.name(f.Name)
	if err != nil || !ok {
		return err
	}
	mode := f.Mode()
	mtime := f.Modified
	if mtime.Year() < 1980 {
		mtime = time.Time{}
	}
	if by := f.CreatorVersion >> 8; by != 3 && by != 19 {
		mode &^= 0o022 // no Unix made it, and its modes say little
	}
	if f.FileInfo().IsDir() {
		return x.dir(name, mode.Perm(), mtime)
	}
	r, err := f.Open()
	if err != nil {
		return noFormat()
	}
	defer r.Close()
	switch {
	case mode&os.ModeSymlink != 0:
		to, err := io.ReadAll(io.LimitReader(r, maxLinkBytes+1))
		if err != nil {
			return broken(err)
		}
		return x.symlink(name, string(to))
	case mode.IsRegular():
		if mode.Perm() == 0 {
			mode |= 0o644
		}
		return x.file(name, mode.Perm(), mtime, r)
	}
	x.skip(f.Name, "it is a device, a FIFO or of another kind that is not made")
	return nil
}
