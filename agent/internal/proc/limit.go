package proc

import (
	"sync"

	"cloche.dev/agent/internal/wire"
)

// limiter applies max_output to one stream: it lets the head through, keeps
// the tail, and counts.
type limiter struct {
	mu      sync.Mutex
	total   int64
	dropped int64
	head    int64 // bytes that may still pass; -1 = no limit
	tail    ring
	onLimit func() // instead of keeping a tail
}

func newLimiter(limit int64, onLimit func()) *limiter {
	switch {
	case limit == 0:
		return &limiter{head: -1}
	case onLimit != nil:
		return &limiter{head: limit, onLimit: onLimit}
	}
	return &limiter{head: limit - limit/2, tail: ring{limit: int(limit / 2)}}
}

// pass takes n bytes and says how many of them go out now.
func (l *limiter) pass(b []byte) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.total += int64(len(b))
	if l.head < 0 {
		return len(b)
	}
	now := int(min(l.head, int64(len(b))))
	l.head -= int64(now)
	over := b[now:]
	if len(over) == 0 {
		return now
	}
	if l.onLimit != nil {
		l.dropped += int64(len(over))
		l.onLimit()
		return now
	}
	l.dropped += int64(l.tail.add(over))
	return now
}

// ring keeps the last bytes of what is added. It grows as it is needed, so
// that a generous limit costs nothing for a command that says little.
type ring struct {
	limit int
	buf   []byte
	start int // of the oldest byte, once the buffer is at its limit
}

// add returns how many bytes fell out.
func (r *ring) add(b []byte) int {
	lost := 0
	if over := len(b) - r.limit; over > 0 {
		lost += over
		b = b[over:]
	}
	if room := r.limit - len(r.buf); room > 0 {
		k := min(room, len(b))
		r.buf = append(r.buf, b[:k]...)
		b = b[k:]
	}
	lost += len(b)
	for len(b) > 0 {
		k := copy(r.buf[r.start:], b)
		b = b[k:]
		r.start = (r.start + k) % r.limit
	}
	return lost
}

// parts gives the kept bytes, oldest first.
func (r *ring) parts() [2][]byte {
	return [2][]byte{r.buf[r.start:], r.buf[:r.start]}
}

// limited is an output behind the limiters of both streams.
type limited struct {
	next recorder
	lim  [3]*limiter
}

// recorder is an output that can also take gaps and the final events.
type recorder interface {
	output
	gap(stream byte, n int64) error
	exit(wire.Exit) error
}

func (l *limited) write(stream byte, framed []byte) error {
	n := l.lim[stream].pass(framed[wire.HeaderSize:])
	if n == 0 {
		return nil
	}
	err := l.next.write(stream, framed[:wire.HeaderSize+n])
	if l.lim[stream].onLimit != nil {
		// The limit holds for a command that nobody listens to as well.
		return nil
	}
	return err
}

func (l *limited) flush() { l.next.flush() }

// exceeded says whether a stream has met its limit.
func (l *limited) exceeded() bool {
	for _, lim := range l.lim[1:] {
		lim.mu.Lock()
		over := lim.dropped > 0
		lim.mu.Unlock()
		if over {
			return true
		}
	}
	return false
}

// finish sends the tails of both streams.
func (l *limited) finish() {
	for stream := byte(wire.TypeStdout); stream <= wire.TypeStderr; stream++ {
		lim := l.lim[stream]
		if lim.dropped > 0 && l.next.gap(stream, lim.dropped) != nil {
			return
		}
		bp := buffers.Get().(*[]byte)
		for _, part := range lim.tail.parts() {
			for len(part) > 0 {
				n := copy((*bp)[wire.HeaderSize:], part)
				part = part[n:]
				if l.next.write(stream, (*bp)[:wire.HeaderSize+n]) != nil {
					part = nil
				}
			}
		}
		buffers.Put(bp)
		lim.tail = ring{}
	}
}
