package scp

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"cloche.dev/agent/internal/sys"
)

// times are those that the next file gets.
type times struct{ atime, mtime int64 }

func (l *line) sink(o *options) error {
	target := o.paths[0]
	if o.directory && !isDir(target) {
		return l.complain(&fs.PathError{Op: "open", Path: target, Err: syscall.ENOTDIR})
	}
	return l.receive(o, target, 0)
}

func isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// deepest bounds how far trees go down.
const deepest = 1000

// receive takes files until the end, or until the end of the directory when it
// is not the outermost one.
func (l *line) receive(o *options, target string, depth int) error {
	if err := l.ok(); err != nil {
		return err
	}
	var when *times
	for {
		text, err := l.text()
		if errors.Is(err, io.EOF) && depth == 0 && text == "" {
			return nil
		}
		if err != nil {
			return err
		}
		if text == "" {
			return errors.New("an empty line")
		}
		switch text[0] {
		case 1:
			l.failed = true
		case 2:
			return errFatal(text[1:])
		case 'E':
			if depth == 0 {
				return errors.New("the end of a directory that was not begun")
			}
			return l.ok()
		case 'T':
			if when, err = readTimes(text[1:]); err == nil {
				err = l.ok()
			}
		case 'C', 'D':
			err = l.take(o, text, target, when, depth)
			when = nil
		default:
			err = errors.New("a line of an unknown kind")
		}
		if err != nil {
			return err
		}
	}
}

func readTimes(text string) (*times, error) {
	var mtime, mus, atime, aus int64
	if _, err := fmt.Sscanf(text, "%d %d %d %d", &mtime, &mus, &atime, &aus); err != nil {
		return nil, errors.New("times that are none")
	}
	limit := int64(1) << 33
	if mtime < 0 || mtime > limit || atime < 0 || atime > limit {
		return nil, errors.New("times that are out of range")
	}
	return &times{atime * int64(time.Second), mtime * int64(time.Second)}, nil
}

// take receives what was announced by `C0644 12 name` or `D0755 0 name`.
func (l *line) take(o *options, text, target string, when *times, depth int) error {
	parts := strings.SplitN(text[1:], " ", 3)
	if len(parts) != 3 {
		return errors.New("a line that is cut short")
	}
	mode, err := strconv.ParseUint(parts[0], 8, 16)
	size, serr := strconv.ParseInt(parts[1], 10, 64)
	name := parts[2]
	if err != nil || serr != nil || size < 0 || mode > 0o7777 {
		return errors.New("a mode or size that is none")
	}
	if name == "" || name == "." || name == ".." || strings.Contains(name, "/") {
		return fmt.Errorf("%q is no name of a file", name)
	}
	path := target
	if isDir(target) {
		path = filepath.Join(target, name)
	}
	if text[0] == 'D' {
		if !o.recursive || depth >= deepest {
			return errors.New("a directory that was not asked for")
		}
		return l.takeTree(o, path, uint32(mode), when, depth)
	}
	return l.takeFile(o, path, uint32(mode), size, when)
}

func (l *line) takeTree(o *options, path string, mode uint32, when *times, depth int) error {
	made := false
	if !isDir(path) {
		if err := syscall.Mkdir(path, mode&0o777|0o700); err != nil {
			// The other side goes on with what comes behind the directory.
			return l.complain(&fs.PathError{Op: "mkdir", Path: path, Err: err})
		}
		made = true
	}
	if err := l.receive(o, path, depth+1); err != nil {
		return err
	}
	// Only now: its own mode may forbid to write to it.
	if o.times || made && mode&0o700 != 0o700 {
		l.note(syscall.Chmod(path, mode&umasked(o)))
	}
	if when != nil {
		l.note(sys.Utimes(path, when.atime, when.mtime, true))
	}
	return nil
}

// umasked are the bits of a mode that are kept: all with -p.
func umasked(o *options) uint32 {
	if o.times {
		return 0o7777
	}
	return 0o755
}

// note remembers a failure that spoils nothing.
func (l *line) note(err error) {
	if err != nil {
		l.failed = true
	}
}

func (l *line) takeFile(o *options, path string, mode uint32, size int64, when *times) error {
	_, err := os.Stat(path)
	fresh := err != nil
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|syscall.O_NONBLOCK, os.FileMode(mode&0o777|0o200))
	if err != nil {
		return l.complain(err)
	}
	defer f.Close()
	if err := l.ok(); err != nil {
		return err
	}
	wrong := l.fill(f, size)
	var broken errFatal
	if errors.As(wrong, &broken) {
		return wrong
	}
	if wrong == nil {
		wrong = settle(f, size)
		if wrong == nil && (o.times || fresh && mode&0o200 == 0) {
			wrong = syscall.Fchmod(int(f.Fd()), mode&umasked(o))
		}
		if wrong == nil && when != nil {
			wrong = sys.Utimes(sys.ProcFD(int(f.Fd())), when.atime, when.mtime, true)
		}
	}
	// What the sender says of the file itself.
	if err := ours(l.answer()); err != nil {
		return err
	}
	if wrong != nil {
		return l.complain(wrong)
	}
	return l.ok()
}

// settle cuts off what an older file had beyond the new content.
func settle(f *os.File, size int64) error {
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return err
	}
	return f.Truncate(size)
}

// fill writes so many bytes, and reads them all whatever becomes of the file.
func (l *line) fill(f *os.File, size int64) error {
	buf := make([]byte, 64<<10)
	var wrong error
	for size > 0 {
		n, err := l.r.Read(buf[:min(size, int64(len(buf)))])
		size -= int64(n)
		if wrong == nil && n > 0 {
			_, wrong = f.Write(buf[:n])
		}
		if err != nil && size > 0 {
			return errFatal("the connection ended in a file")
		}
	}
	return wrong
}
