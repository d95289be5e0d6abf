package files

import (
	"container/heap"
	"sort"
	"sync"
	"syscall"

	"cloche.dev/agent/internal/users"
	"cloche.dev/agent/internal/wire"
)

// MaxList is the most that one listing returns.
const MaxList = 10000

// Listing is one page of a directory.
type Listing struct {
	Path      string  `json:"path"`
	Entries   []Entry `json:"entries"`
	Truncated bool    `json:"truncated"`
	Next      string  `json:"next,omitempty"`
}

// List returns the first limit entries behind the name after, in the order of
// the raw names. Memory is bounded by limit, however large the directory is.
func (f *FS) List(id *users.Identity, path, after string, limit int) (*Listing, error) {
	l := &Listing{Path: text(path), Entries: []Entry{}}
	err := as(id, func() error {
		fd, err := syscall.Open(path, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer syscall.Close(fd)
		names, more, err := smallest(fd, after, limit)
		if err != nil {
			return err
		}
		if more {
			l.Truncated = true
			l.Next = B64.EncodeToString([]byte(names[len(names)-1]))
		}
		l.Entries = f.entries(path, names)
		return nil
	})
	if err != nil {
		return nil, wire.FromErr(err, "path")
	}
	return l, nil
}

// entries examines each name. What has vanished meanwhile is left out; what
// cannot be examined for another reason is listed as it is.
func (f *FS) entries(dir string, names []string) []Entry {
	out := make([]Entry, 0, len(names))
	for _, n := range names {
		path := join(dir, n)
		var st syscall.Stat_t
		switch err := syscall.Lstat(path, &st); err {
		case nil:
			out = append(out, f.describe(n, path, &st))
		case syscall.ENOENT:
		default:
			out = append(out, unknown(n, path))
		}
	}
	return out
}

// maxHeap keeps the smallest names, the largest of them on top.
type maxHeap []string

func (h maxHeap) Len() int           { return len(h) }
func (h maxHeap) Less(i, j int) bool { return h[i] > h[j] }
func (h maxHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *maxHeap) Push(x any)        { *h = append(*h, x.(string)) }
func (h *maxHeap) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}

// smallest reads all of a directory and keeps the limit smallest names above
// after, and whether there are more.
func smallest(fd int, after string, limit int) ([]string, bool, error) {
	var h maxHeap
	more := false
	err := readNames(fd, func(raw []byte) {
		switch {
		case after != "" && string(raw) <= after:
		case len(h) < limit:
			heap.Push(&h, string(raw))
		default:
			more = true
			if string(raw) < h[0] {
				h[0] = string(raw)
				heap.Fix(&h, 0)
			}
		}
	})
	sort.Strings(h)
	return h, more, err
}

var dirBuffers = sync.Pool{New: func() any {
	b := make([]byte, 32<<10)
	return &b
}}

// readNames calls fn with each name but "." and "..".
func readNames(fd int, fn func([]byte)) error {
	bp := dirBuffers.Get().(*[]byte)
	defer dirBuffers.Put(bp)
	for {
		n, err := syscall.ReadDirent(fd, *bp)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || n <= 0 {
			return err
		}
		eachName((*bp)[:n], fn)
	}
}
