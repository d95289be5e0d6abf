package files

import (
	"archive/tar"
	"archive/zip"
	"compress/gzip"
	"context"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"cloche.dev/agent/internal/sys"
	"cloche.dev/agent/internal/users"
	"cloche.dev/agent/internal/wire"
)

// Pack is an archive of a tree that is about to be sent. Entries and Bytes are
// what a look at the tree has found, Skipped what will not be in it: sockets, and
// with the option also what the user may not read.
type Pack struct {
	Entries, Bytes, Skipped int64

	f        *FS
	id       *users.Identity
	path     string
	format   string
	tolerant bool
	choose   filter
}

// PackRequest says what to pack.
type PackRequest struct {
	Path, Format     string
	SkipUnreadable   bool
	Include, Exclude []string
}

// maxZipEntries bounds what has to be remembered for the directory at the end.
const maxZipEntries = 50_000

// NewPack looks through the tree, so that what cannot be read is told before any
// byte is sent.
func (f *FS) NewPack(ctx context.Context, id *users.Identity, r *PackRequest) (*Pack, error) {
	switch r.Format {
	case "tar", "tar.gz", "zip":
	default:
		return nil, wire.BadRequest("format", "want tar, tar.gz or zip")
	}
	choose, err := newFilter(r.Include, r.Exclude)
	if err != nil {
		return nil, err
	}
	p := &Pack{f: f, id: id, path: r.Path, format: r.Format, tolerant: r.SkipUnreadable, choose: choose}
	err = as(id, func() error {
		return p.walk(ctx, func(v *visit, _ string) error {
			p.Entries++
			if kind(v.st.Mode) == syscall.S_IFREG {
				p.Bytes += v.st.Size
				if err := sys.Faccessat(v.dir, v.name, sys.ROK); err != nil {
					return err
				}
			}
			if p.format == "zip" && p.Entries > maxZipEntries {
				return wire.TooLarge("format", "a zip archive holds at most 50000 entries; take tar")
			}
			return nil
		})
	})
	if err != nil {
		return nil, wire.FromErr(err, "path")
	}
	return p, nil
}

// walk calls fn with what belongs into the archive, and its name there.
func (p *Pack) walk(ctx context.Context, fn func(v *visit, name string) error) error {
	p.Skipped = 0
	w := &walker{ctx: ctx}
	w.trouble = func(rel string, err error) error {
		if !p.tolerant || rel == "" {
			return p.about(rel, err)
		}
		p.Skipped++
		return nil
	}
	w.fn = func(v *visit) error {
		if v.rel != "" && p.choose.excluded(v.rel) {
			return errSkipDir
		}
		k := kind(v.st.Mode)
		if k == syscall.S_IFSOCK {
			p.Skipped++
			return nil
		}
		name := v.rel
		if name == "" {
			if v.isDir() {
				return nil // its content, not itself
			}
			name = v.name
		}
		if !v.isDir() && !p.choose.included(name) || v.isDir() && len(p.choose.include) > 0 {
			return nil
		}
		err := fn(v, name)
		switch {
		case v.rel != "" && (err == syscall.ENOENT || err == syscall.ELOOP):
			return nil // it has gone meanwhile
		case err != syscall.EACCES && err != syscall.EPERM:
			return err
		case p.tolerant && v.rel != "":
			p.Skipped++
			return nil
		}
		return p.about(v.rel, err)
	}
	return skipped(w.walk(p.path))
}

// about names the path that is in the way.
func (p *Pack) about(rel string, err error) error {
	e := *wire.FromErr(err, "path")
	e.At, e.AtB64 = exact(filepath.Join(p.path, rel))
	return &e
}

// MediaType is that of the format.
func (p *Pack) MediaType() string {
	return map[string]string{"tar": "application/x-tar", "tar.gz": "application/gzip", "zip": "application/zip"}[p.format]
}

// packer writes one format.
type packer interface {
	add(v *visit, name string) error
	close() error
}

// WriteTo sends the archive. A file that cannot be sent as it was announced ends
// it with an error: nobody shall take it for a whole one.
func (p *Pack) WriteTo(ctx context.Context, w io.Writer) error {
	return as(p.id, func() error {
		var out packer
		switch p.format {
		case "zip":
			out = &zipPacker{ctx: ctx, w: zip.NewWriter(w)}
		case "tar.gz":
			z, _ := gzip.NewWriterLevel(w, gzip.BestSpeed)
			out = &tarPacker{ctx: ctx, users: p.f.Users, w: tar.NewWriter(z), z: z}
		default:
			out = &tarPacker{ctx: ctx, users: p.f.Users, w: tar.NewWriter(w)}
		}
		if err := p.walk(ctx, out.add); err != nil {
			return err
		}
		return out.close()
	})
}

type tarPacker struct {
	ctx   context.Context
	users *users.DB
	w     *tar.Writer
	z     *gzip.Writer
	seen  map[inode]string
}

func (t *tarPacker) add(v *visit, name string) error {
	h := &tar.Header{
		Name: name, Mode: int64(v.st.Mode & 0o7777), Uid: int(v.st.Uid), Gid: int(v.st.Gid),
		Uname: t.users.UserName(v.st.Uid), Gname: t.users.GroupName(v.st.Gid),
		ModTime: time.Unix(0, v.st.Mtim.Nano()), Format: tar.FormatPAX,
	}
	switch kind(v.st.Mode) {
	case syscall.S_IFDIR:
		h.Typeflag, h.Name = tar.TypeDir, name+"/"
	case syscall.S_IFLNK:
		to, err := sys.Readlinkat(v.dir, v.name)
		if err != nil {
			return err
		}
		h.Typeflag, h.Linkname = tar.TypeSymlink, to
	case syscall.S_IFIFO:
		h.Typeflag = tar.TypeFifo
	case syscall.S_IFCHR, syscall.S_IFBLK:
		h.Typeflag = tar.TypeChar
		if kind(v.st.Mode) == syscall.S_IFBLK {
			h.Typeflag = tar.TypeBlock
		}
		h.Devmajor, h.Devminor = int64(v.st.Rdev>>8&0xfff), int64(v.st.Rdev&0xff|v.st.Rdev>>12&0xfff00)
	default:
		return t.file(v, h)
	}
	return t.w.WriteHeader(rawNames(h))
}

// rawNames: names that are not UTF-8 go into the old fields as they are; a PAX
// record has to be UTF-8, so such an entry is written in GNU's form.
func rawNames(h *tar.Header) *tar.Header {
	if text(h.Name) != h.Name || text(h.Linkname) != h.Linkname {
		h.Format = tar.FormatGNU
		h.ModTime = h.ModTime.Truncate(time.Second)
	}
	return h
}

func (t *tarPacker) file(v *visit, h *tar.Header) error {
	fd, err := v.open()
	if err != nil {
		return err
	}
	file := os.NewFile(uintptr(fd), "")
	defer file.Close()
	var st syscall.Stat_t
	if err := syscall.Fstat(fd, &st); err != nil {
		return err
	}
	h.Typeflag = tar.TypeReg
	if st.Nlink > 1 {
		key := inode{st.Dev, st.Ino}
		if first, ok := t.seen[key]; ok {
			h.Typeflag, h.Linkname = tar.TypeLink, first
			return t.w.WriteHeader(rawNames(h))
		}
		if t.seen == nil {
			t.seen = map[inode]string{}
		}
		if len(t.seen) < maxLinked {
			t.seen[key] = h.Name
		}
	}
	h.Size = st.Size
	if err := t.w.WriteHeader(rawNames(h)); err != nil {
		return err
	}
	return copyExactly(t.ctx, t.w, file, st.Size)
}

// copyExactly sends size bytes; a file that has fewer ends the archive, and what
// it has more does not belong to it.
func copyExactly(ctx context.Context, w io.Writer, r io.Reader, size int64) error {
	bp := copyBuffers.Get().(*[]byte)
	defer copyBuffers.Put(bp)
	n, err := io.CopyBuffer(onlyWriter{w}, io.LimitReader(ctxReader{ctx, r}, size), *bp)
	if err == nil && n < size {
		err = ErrShrunk
	}
	return err
}

// onlyWriter hides ReadFrom, which would take a buffer of its own.
type onlyWriter struct{ io.Writer }

func (t *tarPacker) close() error {
	if err := t.w.Close(); err != nil || t.z == nil {
		return err
	}
	return t.z.Close()
}

type zipPacker struct {
	ctx context.Context
	w   *zip.Writer
}

func (z *zipPacker) add(v *visit, name string) error {
	h := &zip.FileHeader{Name: name, Modified: time.Unix(0, v.st.Mtim.Nano()).UTC(), Method: zip.Deflate}
	mode := os.FileMode(v.st.Mode & 0o777)
	switch kind(v.st.Mode) {
	case syscall.S_IFDIR:
		h.Name, h.Method = name+"/", zip.Store
		h.SetMode(mode | os.ModeDir)
		_, err := z.w.CreateHeader(h)
		return err
	case syscall.S_IFLNK:
		to, err := sys.Readlinkat(v.dir, v.name)
		if err != nil {
			return err
		}
		h.Method = zip.Store
		h.SetMode(mode | os.ModeSymlink)
		w, err := z.w.CreateHeader(h)
		if err == nil {
			_, err = io.WriteString(w, to)
		}
		return err
	case syscall.S_IFREG:
	default:
		return nil // a zip archive has no form for it
	}
	fd, err := v.open()
	if err != nil {
		return err
	}
	file := os.NewFile(uintptr(fd), "")
	defer file.Close()
	h.SetMode(mode)
	w, err := z.w.CreateHeader(h)
	if err != nil {
		return err
	}
	var st syscall.Stat_t
	if err := syscall.Fstat(fd, &st); err != nil {
		return err
	}
	return copyExactly(z.ctx, w, file, st.Size)
}

func (z *zipPacker) close() error { return z.w.Close() }

func noFormat() error {
	return &wire.Error{Status: http.StatusBadRequest, Code: "bad_archive", Message: "it is not an archive of this format, or it is damaged", Field: "body"}
}

// cleanName is the name of an entry below the directory, false for one that would
// lead out of it. A leading "./" and double slashes mean nothing.
func cleanName(name string) (string, bool) {
	if name == "" || strings.IndexByte(name, 0) >= 0 || name[0] == '/' {
		return "", false
	}
	for _, part := range strings.Split(name, "/") {
		if part == ".." {
			return "", false
		}
	}
	name = filepath.Clean(name)
	return name, true
}
