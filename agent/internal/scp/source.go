package scp

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

func (l *line) source(o *options) error {
	if err := l.answer(); err != nil {
		return err
	}
	for _, path := range o.paths {
		if err := l.send(o, path); err != nil {
			return err
		}
	}
	return nil
}

// send sends a file or a tree. What concerns this one alone is told and is no
// error.
func (l *line) send(o *options, path string) error {
	// A FIFO without a writer would hold everything up.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return l.complain(err)
	}
	defer f.Close()
	info, err := f.Stat()
	switch {
	case err != nil:
		return l.complain(err)
	case info.IsDir() && !o.recursive:
		return l.complain(fmt.Errorf("%s: not a regular file", path))
	case info.IsDir():
		return l.sendTree(o, path, f, info)
	case !info.Mode().IsRegular():
		return l.complain(fmt.Errorf("%s: not a regular file", path))
	}
	return l.sendFile(o, path, f, info)
}

// begin sends the head of a file or directory. False: the other side refuses it.
func (l *line) begin(o *options, kind byte, path string, info os.FileInfo, size int64) (bool, error) {
	name := filepath.Base(path)
	if strings.ContainsAny(name, "\n") {
		return false, l.complain(fmt.Errorf("%q: a name with a line feed cannot be sent this way", name))
	}
	if o.times {
		when := info.ModTime().Unix()
		fmt.Fprintf(l.w, "T%d 0 %d 0\n", max(0, when), max(0, when))
		if err := l.answer(); err != nil {
			return false, ours(err)
		}
	}
	fmt.Fprintf(l.w, "%c%04o %d %s\n", kind, bits(info.Mode()), size, name)
	err := l.answer()
	return err == nil, ours(err)
}

// ours is an error unless it is only about one file.
func ours(err error) error {
	var refused errRefused
	if errors.As(err, &refused) {
		return nil
	}
	return err
}

func bits(m os.FileMode) uint32 {
	n := uint32(m.Perm())
	for bit, mode := range map[uint32]os.FileMode{0o4000: os.ModeSetuid, 0o2000: os.ModeSetgid, 0o1000: os.ModeSticky} {
		if m&mode != 0 {
			n |= bit
		}
	}
	return n
}

func (l *line) sendFile(o *options, path string, f *os.File, info os.FileInfo) error {
	going, err := l.begin(o, 'C', path, info, info.Size())
	if err != nil || !going {
		return err
	}
	n, err := io.Copy(l.w, io.LimitReader(f, info.Size()))
	if err == nil && n < info.Size() {
		err = fmt.Errorf("%s: became shorter while it was read", path)
	}
	if err == nil {
		if err := l.w.WriteByte(0); err != nil {
			return err
		}
		return ours(l.answer())
	}
	// The other side counts on the announced length.
	if _, zerr := io.CopyN(l.w, zeros{}, info.Size()-n); zerr != nil {
		return zerr
	}
	if err := l.complain(err); err != nil {
		return err
	}
	return ours(l.answer())
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}

func (l *line) sendTree(o *options, path string, f *os.File, info os.FileInfo) error {
	going, err := l.begin(o, 'D', path, info, 0)
	if err != nil || !going {
		return err
	}
	for {
		names, err := f.Readdirnames(1024)
		for _, name := range names {
			if err := l.send(o, filepath.Join(path, name)); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			if err := l.complain(err); err != nil {
				return err
			}
			break
		}
	}
	if _, err := l.w.WriteString("E\n"); err != nil {
		return err
	}
	return ours(l.answer())
}
