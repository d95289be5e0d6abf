package proc

import (
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"cloche.dev/agent/internal/sys"
	"cloche.dev/agent/internal/wire"
)

// output is where a command's output goes. A buffer given to write has
// wire.HeaderSize spare bytes in front of the data.
type output interface {
	write(stream byte, framed []byte) error
	flush()
}

// pump moves what a command writes to one of its streams.
type pump struct {
	file   *os.File
	raw    syscall.RawConn
	fd     int // of file; only the pump's goroutine closes it
	stream byte
	out    output
	sink   int // /dev/null
	tty    bool
	exited atomic.Bool
	done   chan struct{} // closed when all that counts has been delivered

	// What wait reads into and what it got: a closure for each call would
	// be garbage for each call.
	buf []byte
	n   int
	err error
}

var buffers = sync.Pool{New: func() any {
	b := make([]byte, wire.HeaderSize+wire.FullPayload)
	return &b
}}

func newPump(f *os.File, stream byte, out output, sink int) *pump {
	p := &pump{file: f, stream: stream, out: out, done: make(chan struct{}), sink: sink}
	// Neither can fail for a file that is open.
	p.raw, _ = f.SyscallConn()
	_ = p.raw.Control(func(fd uintptr) { p.fd = int(fd) })
	return p
}

// run delivers until the end of the stream, or until the leader has exited and
// the bytes that were in the pipe then have been delivered. Whatever else
// comes, from processes left behind, is then read and ignored.
func (p *pump) run() {
	bp := buffers.Get().(*[]byte)
	eof := p.deliver(*bp)
	p.buf = nil
	buffers.Put(bp)
	close(p.done)
	if !eof && !p.tty {
		p.discard()
	}
	_ = p.file.Close()
}

// deliver reports whether the stream has ended.
func (p *pump) deliver(buf []byte) bool {
	const hs = wire.HeaderSize
	rest, dirty := -1, false
	for {
		if rest < 0 && !p.tty && p.exited.Load() {
			rest, _ = sys.Readable(p.fd)
		}
		room := buf[hs:]
		if rest >= 0 {
			room = room[:min(rest, len(room))]
		}
		if len(room) == 0 {
			return false
		}
		n, err := p.read(room, rest < 0, &dirty)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			if p.tty {
				return false
			}
			continue // leaderExited has set the deadline
		case err != nil:
			return false
		case n == 0:
			return true
		}
		if p.out.write(p.stream, buf[:hs+n]) != nil {
			return false
		}
		dirty = true
		if rest >= 0 {
			rest -= n
		}
	}
}

// read reads once. If there is nothing and wait is set, it shows the host what
// it has been given so far, and sleeps.
func (p *pump) read(room []byte, wait bool, dirty *bool) (int, error) {
	if *dirty || !wait {
		n, err := read(p.fd, room)
		if err != syscall.EAGAIN || !wait {
			return n, err
		}
		p.out.flush()
		*dirty = false
	}
	return p.wait(room)
}

// hangUpWait bounds how long a terminal is read whose leader has ended.
const hangUpWait = 200 * time.Millisecond

// leaderExited makes the pump finish.
func (p *pump) leaderExited() {
	select {
	case <-p.done:
	default:
		p.exited.Store(true)
		if p.tty {
			// The kernel hangs it up when its leader ends, and what was written
			// comes before that. Only who keeps it open by force is cut off.
			_ = p.file.SetReadDeadline(time.Now().Add(hangUpWait))
			return
		}
		_ = p.file.SetReadDeadline(time.Unix(1, 0))
	}
}

// wait sleeps until there is something to read and reads it.
func (p *pump) wait(b []byte) (int, error) {
	p.buf = b
	if err := p.raw.Read(p.readOnce); err != nil {
		return 0, err
	}
	return p.n, p.err
}

func (p *pump) readOnce(fd uintptr) bool {
	p.n, p.err = read(int(fd), p.buf)
	return p.err != syscall.EAGAIN
}

func read(fd int, b []byte) (int, error) {
	for {
		n, err := syscall.Read(fd, b)
		if err != syscall.EINTR {
			return max(n, 0), err
		}
	}
}

// discard keeps reading for a background process, which would otherwise block
// or die of SIGPIPE.
func (p *pump) discard() {
	for {
		// leaderExited may set its deadline late.
		_ = p.file.SetReadDeadline(time.Time{})
		err := p.raw.Read(p.spliceOnce)
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
	}
}

func (p *pump) spliceOnce(fd uintptr) bool {
	for {
		n, err := sys.SpliceAway(int(fd), p.sink, 1<<20)
		if err == syscall.EINTR || err == nil && n > 0 {
			continue
		}
		return err != syscall.EAGAIN
	}
}
