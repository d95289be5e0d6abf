package files

import (
	"errors"
	"io"
	"net/http"
	"os"
	"sync"
	"syscall"

	"cloche.dev/agent/internal/users"
	"cloche.dev/agent/internal/wire"
)

// Content is an open file on its way to the host.
type Content struct {
	Size    int64 // -1: only its end will tell
	Mode    uint32
	MtimeNS int64
	// Tag is empty where a content has no state of its own, as in /proc.
	Tag  string
	file *os.File
}

// Part is where in a file of so many bytes a content is from.
type Part struct{ First, Count, Size int64 }

// Cut makes it a part of the file; an error if the file has none of it.
func (c *Content) Cut(r *Range) (*Part, error) {
	part := r.within(c.Size)
	if part == nil {
		return nil, &wire.Error{Status: http.StatusRequestedRangeNotSatisfiable, Code: "range",
			Message: "the file has no such part", Field: "first", Done: map[string]int64{"size": c.Size}}
	}
	if _, err := c.file.Seek(part.First, io.SeekStart); err != nil {
		return nil, err
	}
	found := &Part{part.First, part.Count, c.Size}
	c.Size = part.Count
	return found, nil
}

// Close must be called.
func (c *Content) Close() { _ = c.file.Close() }

// ErrShrunk says that a file has become shorter than was announced.
var ErrShrunk = errors.New("the file has become shorter")

// Open opens a regular file. The user's rights are checked here and once.
func (f *FS) Open(id *users.Identity, path string) (*Content, error) {
	var c *Content
	err := as(id, func() error {
		// A look first: opening a device may do something.
		var st syscall.Stat_t
		if err := syscall.Stat(path, &st); err != nil {
			return err
		}
		if err := regular(st.Mode); err != nil {
			return err
		}
		fd, err := syscall.Open(path, syscall.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOCTTY|syscall.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		c, err = content(fd, path)
		return err
	})
	if err != nil {
		return nil, wire.FromErr(err, "path")
	}
	return c, nil
}

func content(fd int, path string) (*Content, error) {
	var st syscall.Stat_t
	err := syscall.Fstat(fd, &st)
	if err == nil {
		err = regular(st.Mode)
	}
	if err == nil {
		err = syscall.SetNonblock(fd, false)
	}
	if err != nil {
		_ = syscall.Close(fd)
		return nil, err
	}
	c := &Content{Size: st.Size, Mode: st.Mode & 0o7777, MtimeNS: st.Mtim.Nano(), file: os.NewFile(uintptr(fd), path)}
	var fs syscall.Statfs_t
	if syscall.Fstatfs(fd, &fs) == nil && generated[fs.Type] {
		c.Size = -1
	} else {
		c.Tag = tag(&st)
	}
	return c, nil
}

// generated lists file systems whose files are written by the kernel while
// they are read, so that their size means nothing.
var generated = map[int64]bool{
	0x9fa0:     true, // proc
	0x62656572: true, // sysfs
	0x63677270: true, // cgroup2
	0x27e0eb:   true, // cgroup
	0x64626720: true, // debugfs
	0x74726163: true, // tracefs
	0x73636673: true, // securityfs
	0x62656570: true, // configfs
	0x65735546: true, // fuse: up to its server
}

// copySize is a compromise: a large buffer saves system calls, a small one
// memory.
const copySize = 128 << 10

var copyBuffers = sync.Pool{New: func() any {
	b := make([]byte, copySize)
	return &b
}}

// sendBuffers have room for what is left of a piece before each part of a file.
var sendBuffers = sync.Pool{New: func() any {
	b := make([]byte, 64<<10+copySize)
	return &b
}}

// CopyTo sends the content: exactly Size bytes, or up to the end.
func (c *Content) CopyTo(w io.Writer) error {
	if c.Size < 0 {
		bp := copyBuffers.Get().(*[]byte)
		defer copyBuffers.Put(bp)
		_, err := io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{c.file}, *bp)
		return err
	}
	bp := sendBuffers.Get().(*[]byte)
	defer sendBuffers.Put(bp)
	buf, from := *bp, len(*bp)-copySize
	kept := 0
	for left := c.Size; left > 0; {
		n, err := c.file.Read(buf[from : from+int(min(copySize, left))])
		if err == io.EOF {
			return ErrShrunk
		}
		if err != nil {
			return err
		}
		left -= int64(n)
		ready := buf[from-kept : from+n]
		whole := len(ready) - len(ready)%wire.FullFrame
		if left == 0 {
			whole = len(ready)
		}
		for sent := 0; sent < whole; sent += wire.FullFrame {
			if _, err := w.Write(ready[sent:min(sent+wire.FullFrame, whole)]); err != nil {
				return err
			}
		}
		kept = len(ready) - whole
		copy(buf[from-kept:from], ready[whole:])
	}
	return nil
}
