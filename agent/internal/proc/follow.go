package proc

import (
	"context"
	"sort"

	"cloche.dev/agent/internal/wire"
)

// follower reads a record for one HTTP answer. With a stream it gives the bytes
// of that one alone, and counts those.
type follower struct {
	rec    *record
	out    *frameWriter
	pos    uint64
	stream byte // 0: both
}

// piece is the next thing that a follower sends.
type piece struct {
	stream byte
	data   []byte // inside the follower's buffer
	gap    wire.Gap
	exit   *wire.Exit
	wait   <-chan struct{}
}

// follow sends everything from pos to the exit event.
func (f *follower) follow(ctx context.Context) error {
	bp := buffers.Get().(*[]byte)
	defer buffers.Put(bp)
	started, err := f.start(ctx)
	if err != nil {
		return err
	}
	f.out.offset = f.pos
	if err := f.out.started(started); err != nil {
		return err
	}
	for {
		p := f.take((*bp)[wire.HeaderSize:])
		switch {
		case p.gap.Bytes > 0:
			err = f.out.lost(p.gap)
		case p.data != nil:
			err = f.out.write(p.stream, (*bp)[:wire.HeaderSize+len(p.data)])
		case p.exit != nil:
			return f.out.exit(*p.exit)
		default:
			f.out.flush()
			select {
			case <-p.wait:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		if err != nil {
			return err
		}
	}
}

func (f *follower) start(ctx context.Context) (wire.Started, error) {
	for {
		f.rec.mu.Lock()
		s := f.rec.started
		var wait <-chan struct{}
		if s == nil {
			wait = f.rec.wait()
		} else {
			with := *s
			if f.stream == 0 && f.pos > 0 {
				with.StdoutAt, with.StderrAt = f.rec.at(f.pos)
			}
			s = &with
		}
		f.rec.mu.Unlock()
		if s != nil {
			return *s, nil
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return wire.Started{}, ctx.Err()
		}
	}
}

// from and to are where a segment begins and ends, as this follower counts.
func (f *follower) from(s *segment) uint64 {
	if f.stream != 0 {
		return s.own
	}
	return s.offset
}

func (f *follower) to(s *segment) uint64 {
	if f.stream != 0 {
		return s.ownEnd()
	}
	return s.end()
}

// mine says whether a segment is for this follower.
func (f *follower) mine(s *segment) bool { return f.stream == 0 || s.stream == f.stream }

// take copies the next piece into b, merging what belongs to one stream.
func (f *follower) take(b []byte) piece {
	r := f.rec
	r.mu.Lock()
	defer r.mu.Unlock()
	first := r.first
	if f.stream != 0 {
		first = r.firstOf[f.stream]
	}
	if f.pos < first {
		p := piece{gap: wire.Gap{Stream: int(f.stream), Bytes: int64(first - f.pos)}}
		if f.stream == 0 {
			out, errs := r.firstOf[wire.TypeStdout], r.firstOf[wire.TypeStderr]
			p.gap.StdoutAt, p.gap.StderrAt = &out, &errs
		}
		f.pos = first
		return p
	}
	i := f.find()
	if i == len(r.segments) {
		if r.exited != nil {
			return piece{exit: r.exited}
		}
		return piece{wait: r.wait()}
	}
	s := &r.segments[i]
	if s.gap > 0 {
		p := piece{gap: wire.Gap{Stream: int(s.stream), Bytes: int64(f.to(s) - f.pos)}}
		f.pos = f.to(s)
		return p
	}
	n := 0
	for ; i < len(r.segments) && n < len(b); i++ {
		t := &r.segments[i]
		if !f.mine(t) {
			continue
		}
		if t.stream != s.stream || t.gap > 0 {
			break
		}
		k := copy(b[n:], t.data[f.pos-f.from(t):])
		n += k
		f.pos += uint64(k)
	}
	return piece{stream: s.stream, data: b[:n]}
}

// find is the first segment that holds something new. The lock is held.
func (f *follower) find() int {
	segments := f.rec.segments
	if f.stream == 0 {
		return sort.Search(len(segments), func(i int) bool { return segments[i].end() > f.pos })
	}
	// Those of the other stream stand between: what a stream has so far only
	// grows, but a segment of the other one does not say how much that is.
	for i := len(segments) - 1; i >= 0; i-- {
		s := &segments[i]
		if s.stream == f.stream && s.own <= f.pos {
			if f.pos < s.ownEnd() {
				return i
			}
			return f.next(i + 1)
		}
	}
	return f.next(0)
}

// next is the first segment of the follower's stream from i on.
func (f *follower) next(i int) int {
	for ; i < len(f.rec.segments); i++ {
		if f.rec.segments[i].stream == f.stream {
			return i
		}
	}
	return i
}
