package proc

import (
	"context"
	"sort"

	"cloche.dev/agent/internal/wire"
)

// follower reads a record for one HTTP answer.
type follower struct {
	rec *record
	out *frameWriter
	pos uint64
}

// piece is the next thing that a follower sends.
type piece struct {
	stream byte
	data   []byte // inside the follower's buffer
	gap    int64
	gapAll bool // of both streams
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
		case p.gap > 0:
			stream := p.stream
			if p.gapAll {
				stream = 0
			}
			err = f.out.gap(stream, p.gap)
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

// take copies the next piece into b, merging what belongs to one stream.
func (f *follower) take(b []byte) piece {
	r := f.rec
	r.mu.Lock()
	defer r.mu.Unlock()
	if f.pos < r.first {
		p := piece{gap: int64(r.first - f.pos), gapAll: true}
		f.pos = r.first
		return p
	}
	i := sort.Search(len(r.segments), func(i int) bool { return r.segments[i].end() > f.pos })
	if i == len(r.segments) {
		if r.exited != nil {
			return piece{exit: r.exited}
		}
		return piece{wait: r.wait()}
	}
	s := &r.segments[i]
	if s.gap > 0 {
		p := piece{stream: s.stream, gap: int64(s.end() - f.pos)}
		f.pos = s.end()
		return p
	}
	n := 0
	for ; i < len(r.segments) && n < len(b); i++ {
		t := &r.segments[i]
		if t.stream != s.stream || t.gap > 0 {
			break
		}
		k := copy(b[n:], t.data[f.pos-t.offset:])
		n += k
		f.pos += uint64(k)
	}
	return piece{stream: s.stream, data: b[:n]}
}
