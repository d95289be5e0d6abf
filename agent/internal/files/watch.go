package files

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"cloche.dev/agent/internal/users"
	"cloche.dev/agent/internal/wire"
)

// WatchEvent is one line of a watch. Type: ready, created, modified, attributes,
// deleted, moved (From is the old path), overflow, beat; and last gone or error.
type WatchEvent struct {
	Type    string `json:"type"`
	Path    string `json:"path,omitempty"`
	PathB64 string `json:"path_b64,omitempty"`
	From    string `json:"from,omitempty"`
	FromB64 string `json:"from_b64,omitempty"`
	Dir     bool   `json:"dir,omitempty"`
	Watches int    `json:"watches,omitempty"`
	Code    string `json:"code,omitempty"`
}

const (
	// DefaultWatches is how many directories one watch has at most, MaxWatches
	// what may be asked for.
	DefaultWatches = 8192
	MaxWatches     = 65536
	// watchQueue is how many events wait for a reader that is slow.
	watchQueue = 2048
	watchBeat  = 8 * time.Second
	// moveWait is how long the first half of a move waits for the second.
	moveWait = 20 * time.Millisecond

	watchMask = syscall.IN_CREATE | syscall.IN_MODIFY | syscall.IN_ATTRIB | syscall.IN_DELETE |
		syscall.IN_MOVED_FROM | syscall.IN_MOVED_TO | syscall.IN_DELETE_SELF | syscall.IN_MOVE_SELF |
		syscall.IN_ONLYDIR | syscall.IN_EXCL_UNLINK
)

var errTooManyWatches = &wire.Error{Status: http.StatusServiceUnavailable, Code: "too_many_watches",
	Message: "there are more directories than may be watched", Field: "path"}

// Watch is a watch that has been set up.
type Watch struct {
	f         *FS
	id        *users.Identity
	root      string
	recursive bool
	most      int
	in        *os.File
	fd        int
	// By the number of the watch: its directory, and what has been told of it
	// before its own events came.
	dirs  map[int32]string
	told  map[int32]map[string]bool
	byDir map[string]int32
	half  *WatchEvent
	mark  uint32

	stopping atomic.Bool
	mu       sync.Mutex
	queue    []WatchEvent
	lost     bool
	finished bool
	wake     chan struct{}
}

// NewWatch watches a directory; recursive, all below it. What happens from now on
// is not missed.
func (f *FS) NewWatch(id *users.Identity, path string, recursive bool, most int) (*Watch, error) {
	fd, err := syscall.InotifyInit1(syscall.IN_CLOEXEC | syscall.IN_NONBLOCK)
	if err != nil {
		return nil, wire.FromErr(err, "path")
	}
	w := &Watch{
		f: f, id: id, root: filepath.Clean(path), recursive: recursive, most: most, fd: fd,
		in: os.NewFile(uintptr(fd), "inotify"), dirs: map[int32]string{}, told: map[int32]map[string]bool{},
		byDir: map[string]int32{}, wake: make(chan struct{}, 1),
	}
	err = as(id, func() error { return w.add("", false) })
	if err == nil && len(w.dirs) == 0 {
		err = syscall.ENOENT
	}
	if err != nil {
		_ = w.in.Close()
		return nil, wire.FromErr(err, "path")
	}
	return w, nil
}

// add watches a directory, and those below it; tell: what is in them is new to
// whoever listens. It runs as the user.
func (w *Watch) add(rel string, tell bool) error {
	wd, err := syscall.InotifyAddWatch(w.fd, join(w.root, rel), watchMask|w.noFollow(rel))
	switch {
	case err == syscall.ENOSPC:
		return errTooManyWatches
	case err != nil && rel == "":
		return err
	case err != nil:
		return nil // gone again, not a directory any more, or closed to the user
	}
	n := int32(wd)
	if old, ok := w.dirs[n]; ok && old != rel {
		delete(w.byDir, old)
	} else if !ok && len(w.dirs) >= w.most {
		_, _ = syscall.InotifyRmWatch(w.fd, uint32(wd))
		return errTooManyWatches
	}
	w.dirs[n], w.byDir[rel] = rel, n
	if !w.recursive {
		return nil
	}
	fd, err := syscall.Open(join(w.root, rel), syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_CLOEXEC|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil
	}
	defer syscall.Close(fd)
	for {
		names, err := someNames(fd, walkBatch)
		if err != nil || len(names) == 0 {
			return nil
		}
		for _, name := range names {
			if err := w.found(n, rel, name, tell); err != nil {
				return err
			}
		}
	}
}

func (w *Watch) noFollow(rel string) uint32 {
	if rel == "" {
		return 0
	}
	return syscall.IN_DONT_FOLLOW
}

// found is told of what is in a directory when its watch has been set.
func (w *Watch) found(n int32, rel, name string, tell bool) error {
	path := below(rel, name)
	var st syscall.Stat_t
	if syscall.Lstat(join(w.root, path), &st) != nil {
		return nil
	}
	isDir := kind(st.Mode) == syscall.S_IFDIR
	if tell && !isTemporary(name) {
		if w.told[n] == nil {
			w.told[n] = map[string]bool{}
		}
		if len(w.told[n]) < watchQueue {
			w.told[n][name] = true
		}
		w.send("created", path, isDir)
	}
	if !isDir {
		return nil
	}
	if strings.Count(path, "/") >= walkDepth {
		return nil
	}
	var fs syscall.Statfs_t
	if syscall.Statfs(join(w.root, path), &fs) == nil && generated[fs.Type] {
		return nil
	}
	return w.add(path, tell)
}

func below(rel, name string) string {
	if rel == "" {
		return name
	}
	return rel + "/" + name
}

// Run sends events until the directory or the reader has gone. A reader that is
// slow makes events be lost, never kept, and is told so with overflow.
func (w *Watch) Run(ctx context.Context, emit Emit) error {
	ready := WatchEvent{Type: "ready", Watches: len(w.byDir)}
	stop := func() {
		w.stopping.Store(true)
		_ = w.in.SetReadDeadline(time.Unix(1, 0))
	}
	defer context.AfterFunc(ctx, stop)()
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer w.finish()
		w.read()
	}()
	defer func() {
		stop()
		<-done // its descriptor is not closed while it is in use
		_ = w.in.Close()
	}()
	if err := emitAll(emit, ready); err != nil {
		return err
	}
	beat := time.NewTicker(watchBeat)
	defer beat.Stop()
	for {
		events, finished := w.take()
		if err := emitAll(emit, events...); err != nil {
			return err
		}
		if finished {
			return nil
		}
		if len(events) > 0 {
			continue
		}
		select {
		case <-w.wake:
		case <-beat.C:
			if err := emitAll(emit, WatchEvent{Type: "beat"}); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// emitAll sends events, and makes sure that they go out.
func emitAll(emit Emit, events ...WatchEvent) error {
	for _, e := range events {
		if err := emit(e); err != nil {
			return err
		}
	}
	return emit(nil)
}

func (w *Watch) take() ([]WatchEvent, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	events := w.queue
	w.queue = nil
	if w.lost {
		w.lost = false
		last := len(events)
		if w.finished && last > 0 {
			last-- // what ends a watch stays the last
		}
		events = append(events[:last:last], append([]WatchEvent{{Type: "overflow"}}, events[last:]...)...)
	}
	return events, w.finished && len(w.queue) == 0
}

func (w *Watch) finish() {
	w.mu.Lock()
	w.finished = true
	w.mu.Unlock()
	w.poke()
}

func (w *Watch) poke() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func (w *Watch) push(e WatchEvent, last bool) {
	w.mu.Lock()
	switch n := len(w.queue); {
	case n >= watchQueue && !last:
		w.lost = true
	case n > 0 && e.Type == "modified" && w.queue[n-1] == e:
		// The same again, and nobody has read the first.
	default:
		w.queue = append(w.queue, e)
	}
	w.mu.Unlock()
	w.poke()
}

func (w *Watch) send(typ, rel string, dir bool) {
	e := WatchEvent{Type: typ, Dir: dir}
	e.Path, e.PathB64 = exact(join(w.root, rel))
	w.push(e, false)
}

func (w *Watch) overflow() {
	w.mu.Lock()
	w.lost = true
	w.mu.Unlock()
	w.poke()
}
