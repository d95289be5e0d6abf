package proc

import (
	"context"
	"errors"
	"os"
	"sync"
	"syscall"
	"time"

	"cloche.dev/agent/internal/sys"
	"cloche.dev/agent/internal/wire"
)

// MaxInput bounds what one call writes: it is held in memory meanwhile.
const MaxInput = 256 << 10

// input is where a command reads from while it runs: a pipe or a terminal.
type input struct {
	file *os.File
	tty  bool
	turn chan struct{} // holds one token: writers take turns

	mu     sync.Mutex
	closed bool
	size   Size
}

func newInput(f *os.File, size *Size) *input {
	in := &input{file: f, turn: make(chan struct{}, 1)}
	if size != nil {
		in.tty, in.size = true, *size
	}
	in.turn <- struct{}{}
	return in
}

// Written is what became of a write.
type Written struct {
	Bytes  int  `json:"bytes"`
	Closed bool `json:"closed"`
}

func inputClosed() error {
	return wire.Conflict("conflict", "stdin", "the input of this command is closed")
}

// write waits at most so long for the command to read. How much it took is in
// the answer; a command that has closed its end makes the rest fail.
func (in *input) write(ctx context.Context, b []byte, wait time.Duration) (Written, error) {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	select {
	case <-in.turn:
	case <-ctx.Done():
		return Written{}, nil
	}
	defer func() { in.turn <- struct{}{} }()
	if in.isClosed() {
		return Written{}, inputClosed()
	}
	_ = in.file.SetWriteDeadline(time.Time{})
	stop := context.AfterFunc(ctx, func() { _ = in.file.SetWriteDeadline(time.Unix(1, 0)) })
	n, err := in.file.Write(b)
	// Whoever comes next must not meet a deadline of ours that comes late.
	if !stop() {
		<-ctx.Done()
	}
	switch {
	case err == nil || errors.Is(err, os.ErrDeadlineExceeded):
		return Written{Bytes: n, Closed: in.isClosed()}, nil
	case n > 0:
		in.close()
		return Written{Bytes: n, Closed: true}, nil
	}
	in.close()
	return Written{}, inputClosed()
}

func (in *input) isClosed() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.closed
}

// close is the end of the input. The file of a terminal is the pump's as well,
// which closes it.
func (in *input) close() {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.closed {
		return
	}
	in.closed = true
	if in.tty {
		_ = in.file.SetWriteDeadline(time.Unix(1, 0))
		return
	}
	_ = in.file.Close()
}

func (in *input) resize(s Size) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.closed {
		return wire.Conflict("conflict", "pty", "the terminal is closed")
	}
	raw, err := in.file.SyscallConn()
	if err == nil {
		var inner error
		err = raw.Control(func(fd uintptr) { inner = sys.Resize(int(fd), uint16(s.Cols), uint16(s.Rows)) })
		err = errors.Join(err, inner)
	}
	if err != nil {
		return wire.Conflict("conflict", "pty", "the terminal is closed")
	}
	in.size = s
	return nil
}

// state is what the list of commands says about it.
func (in *input) state() (string, *Size) {
	if in == nil {
		return "none", nil
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	switch {
	case in.tty:
		size := in.size
		return "pty", &size
	case in.closed:
		return "closed", nil
	}
	return "pipe", nil
}

// interactive finds a running command and its input.
func (m *Manager) interactive(id string) (*input, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.running[id]
	switch {
	case e == nil && m.find(id) == nil && !m.recent[id]:
		return nil, notFound()
	case e == nil:
		return nil, ended()
	case e.in == nil:
		return nil, wire.Conflict("conflict", "stdin", "this command was started without an input")
	}
	return e.in, nil
}

func ended() error { return wire.Conflict("conflict", "exec_id", "the command has ended") }

// Input writes to the input of a command.
func (m *Manager) Input(ctx context.Context, id string, b []byte, wait time.Duration) (Written, error) {
	in, err := m.interactive(id)
	if err != nil {
		return Written{}, err
	}
	if len(b) == 0 {
		return Written{Closed: in.isClosed()}, nil
	}
	return in.write(ctx, b, wait)
}

// CloseInput ends the input of a command, after what is being written now.
func (m *Manager) CloseInput(ctx context.Context, id string) error {
	in, err := m.interactive(id)
	if err != nil {
		return err
	}
	if in.tty {
		return wire.Conflict("conflict", "stdin", "a terminal has no end of its input; send the character 4 (Ctrl-D)")
	}
	select {
	case <-in.turn:
		in.close()
		in.turn <- struct{}{}
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Resize gives a terminal another size.
func (m *Manager) Resize(id string, s Size) error {
	if err := s.Check(); err != nil {
		return err
	}
	in, err := m.interactive(id)
	if err != nil {
		return err
	}
	if !in.tty {
		return wire.Conflict("conflict", "pty", "this command has no terminal")
	}
	return in.resize(s)
}

// openTTY makes the terminal of a command.
func (p *pipes) openTTY(size Size, uid uint32) error {
	master, slave, err := sys.OpenPTY()
	if err != nil {
		return noTerminal(err)
	}
	p.child = [3]int{slave, slave, slave}
	if uid != 0 {
		_ = syscall.Fchown(slave, int(uid), -1)
	}
	if err := sys.Resize(master, uint16(size.Cols), uint16(size.Rows)); err != nil {
		_ = syscall.Close(master)
		return err
	}
	if err := sys.SetNonblock(master); err != nil {
		_ = syscall.Close(master)
		return err
	}
	p.tty = true
	p.stdout = os.NewFile(uintptr(master), "terminal")
	return nil
}

// noTerminal tells what is wrong with the machine.
func noTerminal(err error) error {
	if errors.Is(err, syscall.ENOSPC) {
		return wire.Exhausted("no terminals left")
	}
	if errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.EIO) || errors.Is(err, syscall.ENODEV) {
		return wire.Conflict("conflict", "pty", "there are no terminals: /dev/ptmx or /dev/pts is missing")
	}
	return err
}
