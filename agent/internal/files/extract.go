package files

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"cloche.dev/agent/internal/users"
	"cloche.dev/agent/internal/wire"
)

// ExtractRequest says where an archive goes. MaxBytes and MaxEntries bound what
// comes out of it, 0 for no bound but the disk's.
type ExtractRequest struct {
	Path, Format         string
	MaxBytes, MaxEntries int64
	// Strip leaves so many leading components of each name out.
	Strip int
}

// Extracted is what has come out of an archive. An error in the middle leaves what
// came before it, and says it with one of these.
type Extracted struct {
	Path    string    `json:"path"`
	Files   int64     `json:"files"`
	Dirs    int64     `json:"dirs"`
	Links   int64     `json:"links"`
	Bytes   int64     `json:"bytes"`
	Skipped int64     `json:"skipped"`
	Notices []Skipped `json:"notices"`
}

// Skipped is an entry that was left out.
type Skipped struct {
	Name string `json:"name"`
	Why  string `json:"why"`
}

const (
	maxNotices   = 100
	maxDirModes  = 100_000
	maxLinkBytes = syscall.PathMax
)

// extraction puts entries below a directory. Everything goes through an os.Root,
// which no name and no link leads out of: not one of the archive, and not one
// that is there already.
type extraction struct {
	ctx  context.Context
	r    *ExtractRequest
	root *os.Root
	done Extracted
	seen int64
	dirs []dirMode
}

type dirMode struct {
	name  string
	mode  os.FileMode
	mtime time.Time
}

// Extract unpacks body, as the user, who will own it all.
func (f *FS) Extract(ctx context.Context, id *users.Identity, r *ExtractRequest, body io.Reader) (*Extracted, error) {
	x := &extraction{ctx: ctx, r: r}
	x.done.Path, x.done.Notices = text(r.Path), []Skipped{}
	err := as(id, func() error {
		if err := makeParents(r.Path); err != nil {
			return err
		}
		var err error
		if x.root, err = os.OpenRoot(r.Path); err != nil {
			return err
		}
		defer x.root.Close()
		switch r.Format {
		case "tar":
			err = x.tar(body)
		case "tar.gz":
			err = x.gzip(body)
		case "zip":
			err = x.zip(body)
		default:
			return wire.BadRequest("format", "want tar, tar.gz or zip")
		}
		if derr := x.finishDirs(); err == nil {
			err = derr
		}
		return err
	})
	if err != nil {
		e := *wire.FromErr(err, "path")
		if x.root != nil {
			e.Done = &x.done
		}
		return nil, &e
	}
	return &x.done, nil
}

func (x *extraction) gzip(body io.Reader) error {
	z, err := gzip.NewReader(bufio.NewReaderSize(body, copySize))
	if err != nil {
		return broken(err)
	}
	return x.tar(z)
}

// broken tells damage of the archive from an upload that was cut short.
func broken(err error) error {
	var e *wire.Error
	var no syscall.Errno
	if errors.As(err, &e) || errors.As(err, &no) || errors.Is(err, context.Canceled) {
		return err
	}
	return noFormat()
}

func (x *extraction) tar(body io.Reader) error {
	t := tar.NewReader(body)
	for {
		h, err := t.Next()
		if err == io.EOF {
			// What stands behind the end is read, so that the sender can finish.
			_, err = io.Copy(io.Discard, io.LimitReader(body, maxPadding))
			if err != nil {
				return broken(err)
			}
			return nil
		}
		if err != nil {
			return broken(err)
		}
		if err := x.tarEntry(t, h); err != nil {
			return err
		}
	}
}

const maxPadding = 64 << 20

func (x *extraction) tarEntry(t *tar.Reader, h *tar.Header) error {
	name, ok, err := x.name(h.Name)
	if err != nil || !ok {
		return err
	}
	mode := os.FileMode(h.Mode & 0o777)
	switch h.Typeflag {
	case tar.TypeDir:
		return x.dir(name, mode, h.ModTime)
	case tar.TypeReg, tar.TypeGNUSparse:
		return x.file(name, mode, h.ModTime, t)
	case tar.TypeSymlink:
		return x.symlink(name, h.Linkname)
	case tar.TypeLink:
		return x.hardlink(name, h.Linkname)
	case tar.TypeXGlobalHeader:
		return nil
	}
	x.skip(h.Name, "it is a device, a FIFO or of another kind that is not made")
	return nil
}

// name checks that of an entry and counts it.
func (x *extraction) name(raw string) (string, bool, error) {
	if err := x.ctx.Err(); err != nil {
		return "", false, err
	}
	if x.seen++; x.r.MaxEntries > 0 && x.seen > x.r.MaxEntries {
		return "", false, wire.TooLarge("max_entries", "the archive has more entries than allowed")
	}
	stripped := raw
	for range x.r.Strip {
		_, rest, found := strings.Cut(strings.TrimPrefix(stripped, "./"), "/")
		if !found || rest == "" {
			return "", false, nil
		}
		stripped = rest
	}
	name, ok := cleanName(stripped)
	if !ok {
		return "", false, &wire.Error{Status: 400, Code: "unsafe_archive", Message: "an entry would be outside of the directory", Field: "body"}
	}
	return name, name != ".", nil
}

func (x *extraction) skip(name, why string) {
	x.done.Skipped++
	if len(x.done.Notices) < maxNotices {
		x.done.Notices = append(x.done.Notices, Skipped{text(name), why})
	}
}

// wrap makes an answer of what an os.Root says, which knows errors of its own.
func wrap(err error) error {
	if err == nil {
		return nil
	}
	var no syscall.Errno
	var e *wire.Error
	switch {
	case errors.As(err, &no) || errors.As(err, &e):
		return err
	case errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrExist):
		return err
	}
	var p *fs.PathError
	var l *os.LinkError
	if errors.As(err, &p) || errors.As(err, &l) {
		return &wire.Error{Status: 400, Code: "unsafe_archive", Message: "an entry would be outside of the directory", Field: "body"}
	}
	return err
}

// parents makes the directories above an entry. What stands in the way is left.
func (x *extraction) parents(name string) error {
	dir := filepath.Dir(name)
	if dir == "." {
		return nil
	}
	if st, err := x.root.Stat(dir); err == nil {
		if !st.IsDir() {
			return syscall.ENOTDIR
		}
		return nil
	}
	return wrap(x.root.MkdirAll(dir, 0o755))
}

func (x *extraction) dir(name string, mode os.FileMode, mtime time.Time) error {
	if err := x.parents(name); err != nil {
		return err
	}
	st, err := x.root.Lstat(name)
	if err == nil && !st.IsDir() {
		if to, serr := x.root.Stat(name); serr == nil && to.IsDir() && st.Mode()&os.ModeSymlink != 0 {
			return nil // a link to a directory in here stays
		}
		if err := x.root.Remove(name); err != nil {
			return wrap(err)
		}
	}
	if err := x.root.MkdirAll(name, 0o755); err != nil {
		return wrap(err)
	}
	x.done.Dirs++
	if len(x.dirs) < maxDirModes {
		x.dirs = append(x.dirs, dirMode{name, mode, mtime})
	}
	return nil
}

// finishDirs gives directories their modes and times, those in others first.
func (x *extraction) finishDirs() error {
	var first error
	for i := len(x.dirs) - 1; i >= 0; i-- {
		d := x.dirs[i]
		f, err := x.root.Open(d.name)
		if err != nil {
			continue // a later entry has put something else there
		}
		if err = f.Chmod(d.mode); err == nil && !d.mtime.IsZero() {
			err = setTimes(f, d.mtime)
		}
		_ = f.Close()
		if err != nil && first == nil {
			first = wrap(err)
		}
	}
	return first
}

// file writes beside the name and renames, so that no link and no old content is
// written through.
func (x *extraction) file(name string, mode os.FileMode, mtime time.Time, body io.Reader) error {
	if err := x.parents(name); err != nil {
		return err
	}
	dir, base := filepath.Split(name)
	if len(base) > 255 {
		return syscall.ENAMETOOLONG
	}
	tmp := dir + temporaryName()
	f, err := x.root.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return wrap(err)
	}
	n, err := x.fill(f, body)
	x.done.Bytes += n
	if err == nil {
		err = f.Chmod(mode)
	}
	if err == nil && !mtime.IsZero() {
		err = setTimes(f, mtime)
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = x.root.Rename(tmp, name)
	}
	if err != nil {
		_ = x.root.Remove(tmp)
		return wrap(err)
	}
	x.done.Files++
	return nil
}

func (x *extraction) fill(f *os.File, body io.Reader) (int64, error) {
	in := io.Reader(ctxReader{x.ctx, body})
	if x.r.MaxBytes > 0 {
		in = io.LimitReader(in, x.r.MaxBytes-x.done.Bytes+1)
	}
	n, err := fill(int(f.Fd()), in)
	if x.r.MaxBytes > 0 && x.done.Bytes+n > x.r.MaxBytes {
		return n, wire.TooLarge("max_bytes", "the archive has more bytes than allowed")
	}
	var no syscall.Errno
	if err != nil && !errors.As(err, &no) {
		err = broken(err)
	}
	return n, err
}

// clear takes away what has the name of a link, but a directory only when it is empty.
func (x *extraction) clear(name string) error {
	if err := x.parents(name); err != nil {
		return err
	}
	err := x.root.Remove(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return wrap(err)
}

func (x *extraction) symlink(name, to string) error {
	if to == "" || len(to) >= maxLinkBytes || strings.IndexByte(to, 0) >= 0 {
		x.skip(name, "its target can't be one")
		return nil
	}
	if err := x.clear(name); err != nil {
		return err
	}
	if err := x.root.Symlink(to, name); err != nil {
		return wrap(err)
	}
	x.done.Links++
	return nil
}

func (x *extraction) hardlink(name, to string) error {
	target, ok, err := x.name(to)
	x.seen--
	if err != nil {
		return err
	}
	if !ok || target == name {
		x.skip(name, "what it is a link to is not in the archive")
		return nil
	}
	if err := x.clear(name); err != nil {
		return err
	}
	if err := x.root.Link(target, name); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			x.skip(name, "what it is a link to is not there")
			return nil
		}
		return wrap(err)
	}
	x.done.Links++
	return nil
}
