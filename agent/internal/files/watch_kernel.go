// What the kernel tells of a watch, and what becomes of it.

package files

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// read takes what the kernel has to say, until the watch is over.
func (w *Watch) read() {
	buf := make([]byte, 64<<10)
	for {
		n, err := w.in.Read(buf)
		if w.stopping.Load() {
			return
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			w.settle()
			w.deadline(time.Time{})
			continue
		}
		if err != nil {
			return
		}
		err = as(w.id, func() error { return w.batch(buf[:n]) })
		if err != nil {
			code := "internal"
			if err == errTooManyWatches {
				code = "too_many_watches"
			}
			typ := "error"
			if err == errGone {
				typ, code = "gone", ""
			}
			w.settle()
			w.push(WatchEvent{Type: typ, Code: code}, true)
			return
		}
		if w.half != nil {
			w.deadline(time.Now().Add(moveWait))
		}
	}
}

// deadline is for the next read; one that stops the watch is not undone.
func (w *Watch) deadline(t time.Time) {
	_ = w.in.SetReadDeadline(t)
	if w.stopping.Load() {
		_ = w.in.SetReadDeadline(time.Unix(1, 0))
	}
}

var errGone = errors.New("the directory has gone")

func (w *Watch) batch(b []byte) error {
	for len(b) >= syscall.SizeofInotifyEvent {
		wd := int32(binary.NativeEndian.Uint32(b))
		mask := binary.NativeEndian.Uint32(b[4:])
		cookie := binary.NativeEndian.Uint32(b[8:])
		size := int(binary.NativeEndian.Uint32(b[12:]))
		raw := b[syscall.SizeofInotifyEvent : syscall.SizeofInotifyEvent+size]
		name, _, _ := bytes.Cut(raw, []byte{0})
		b = b[syscall.SizeofInotifyEvent+size:]
		if err := w.event(wd, mask, cookie, string(name)); err != nil {
			return err
		}
	}
	return nil
}

func (w *Watch) event(wd int32, mask, cookie uint32, name string) error {
	if mask&syscall.IN_Q_OVERFLOW != 0 {
		w.overflow()
		return w.again()
	}
	rel, known := w.dirs[wd]
	switch {
	case !known:
		return nil
	case rel == "" && mask&(syscall.IN_DELETE_SELF|syscall.IN_MOVE_SELF|syscall.IN_UNMOUNT|syscall.IN_IGNORED) != 0:
		return errGone
	case mask&(syscall.IN_IGNORED|syscall.IN_UNMOUNT) != 0:
		w.forget(wd)
		return nil
	case name == "":
		return nil // what happens to a directory itself is told by the one above
	}
	path, dir := below(rel, name), mask&syscall.IN_ISDIR != 0
	if w.half != nil && (mask&syscall.IN_MOVED_TO == 0 || cookie != w.mark) {
		w.settle()
	}
	switch {
	case mask&syscall.IN_CREATE != 0:
		return w.created(wd, path, name, dir)
	case mask&syscall.IN_MOVED_TO != 0:
		return w.movedTo(wd, path, name, dir)
	case mask&syscall.IN_MOVED_FROM != 0:
		delete(w.told[wd], name)
		w.half, w.mark = &WatchEvent{Type: "deleted", Path: path, Dir: dir}, cookie
	case isTemporary(name):
	case mask&syscall.IN_DELETE != 0:
		delete(w.told[wd], name)
		w.send("deleted", path, dir)
	case mask&syscall.IN_MODIFY != 0:
		w.send("modified", path, dir)
	case mask&syscall.IN_ATTRIB != 0:
		w.send("attributes", path, dir)
	}
	return nil
}

func (w *Watch) created(wd int32, path, name string, dir bool) error {
	if w.told[wd][name] {
		// It was found, with what it holds, before its own event came.
		delete(w.told[wd], name)
		return nil
	}
	if !isTemporary(name) {
		w.send("created", path, dir)
	}
	if dir && w.recursive {
		return w.add(path, true)
	}
	return nil
}

func (w *Watch) movedTo(wd int32, path, name string, dir bool) error {
	half := w.half
	w.half = nil
	if half == nil || isTemporary(filepath.Base(half.Path)) {
		return w.created(wd, path, name, dir)
	}
	e := WatchEvent{Type: "moved", Dir: dir}
	e.Path, e.PathB64 = exact(join(w.root, path))
	e.From, e.FromB64 = exact(join(w.root, half.Path))
	w.push(e, false)
	if dir && w.recursive {
		w.rename(half.Path, path)
		return w.add(path, false) // one that was not watched for some reason
	}
	return nil
}

// settle: the first half of a move had no second one, so it went out of sight.
func (w *Watch) settle() {
	half := w.half
	w.half = nil
	if half == nil {
		return
	}
	if half.Dir {
		w.drop(half.Path)
	}
	if !isTemporary(filepath.Base(half.Path)) {
		w.send("deleted", half.Path, half.Dir)
	}
}

func (w *Watch) rename(from, to string) {
	for wd, rel := range w.dirs {
		if rel == from || strings.HasPrefix(rel, from+"/") {
			delete(w.byDir, rel)
			moved := to + rel[len(from):]
			w.dirs[wd] = moved
		}
	}
	for wd, rel := range w.dirs {
		w.byDir[rel] = wd
	}
}

func (w *Watch) drop(from string) {
	for wd, rel := range w.dirs {
		if rel == from || strings.HasPrefix(rel, from+"/") {
			_, _ = syscall.InotifyRmWatch(w.fd, uint32(wd))
			w.forget(wd)
		}
	}
}

func (w *Watch) forget(wd int32) {
	if rel := w.dirs[wd]; w.byDir[rel] == wd {
		delete(w.byDir, rel)
	}
	delete(w.dirs, wd)
	delete(w.told, wd)
}

// again: events were lost, and with them perhaps new directories.
func (w *Watch) again() error {
	w.half = nil
	w.told = map[int32]map[string]bool{}
	return w.add("", false)
}
