// Package scp is the far side of the old protocol of scp: what `scp -O` starts
// on a server, to send files with -f and to receive them with -t.
package scp

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

// options are the flags of the far side that mean anything.
type options struct {
	from, to, recursive, times, directory bool
	paths                                 []string
}

// Run is the program; args come after its name. It gives the exit status.
func Run(args []string, r io.Reader, w io.Writer) int {
	o, err := parse(args)
	if err != nil {
		fmt.Fprintln(os.Stderr, "scp:", err)
		return 2
	}
	l := &line{r: bufio.NewReaderSize(r, 256<<10), w: bufio.NewWriterSize(w, 256<<10)}
	if o.from {
		err = l.source(o)
	} else {
		err = l.sink(o)
	}
	if ferr := l.w.Flush(); err == nil {
		err = ferr
	}
	if err != nil || l.failed {
		return 1
	}
	return 0
}

func parse(args []string) (*options, error) {
	o := &options{}
	for len(args) > 0 && strings.HasPrefix(args[0], "-") && args[0] != "-" {
		word := args[0][1:]
		args = args[1:]
		if word == "-" {
			break
		}
		for _, c := range word {
			switch c {
			case 'f':
				o.from = true
			case 't':
				o.to = true
			case 'r':
				o.recursive = true
			case 'p':
				o.times = true
			case 'd':
				o.directory = true
			case 'v', 'q':
			default:
				return nil, fmt.Errorf("unknown flag -%c", c)
			}
		}
	}
	o.paths = args
	if o.from == o.to {
		return nil, errors.New("want one of -f and -t; in a sandbox scp is only the far side of a copy")
	}
	if len(args) == 0 || o.to && len(args) != 1 {
		return nil, errors.New("want a path")
	}
	return o, nil
}

// line is the connection with the other scp.
type line struct {
	r      *bufio.Reader
	w      *bufio.Writer
	failed bool // something could not be copied, and the rest was
}

// errFatal is what the other side has said that ends everything.
type errFatal string

func (e errFatal) Error() string { return string(e) }

// errRefused is said of one file.
type errRefused string

func (e errRefused) Error() string { return string(e) }

// maxText bounds a line of the protocol.
const maxText = 64 << 10

// text is a line; with an error, what there was of it.
func (l *line) text() (string, error) {
	var b []byte
	for {
		c, err := l.r.ReadByte()
		if err != nil {
			return string(b), err
		}
		if c == '\n' {
			return string(b), nil
		}
		if b = append(b, c); len(b) > maxText {
			return "", errors.New("a line that is too long")
		}
	}
}

// answer waits for what the other side says to what it was sent.
func (l *line) answer() error {
	if err := l.w.Flush(); err != nil {
		return err
	}
	c, err := l.r.ReadByte()
	if err != nil {
		return err
	}
	if c == 0 {
		return nil
	}
	text, err := l.text()
	if err != nil {
		return err
	}
	l.failed = true
	if c == 1 {
		return errRefused(text)
	}
	return errFatal(text)
}

func (l *line) ok() error {
	if err := l.w.WriteByte(0); err != nil {
		return err
	}
	return l.w.Flush()
}

// complain says what is wrong with one file.
func (l *line) complain(err error) error {
	l.failed = true
	text := strings.ReplaceAll(err.Error(), "\n", "?")
	if _, err := fmt.Fprintf(l.w, "\x01scp: %s\n", text); err != nil {
		return err
	}
	return l.w.Flush()
}
