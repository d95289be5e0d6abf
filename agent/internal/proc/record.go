package proc

import (
	"sync"

	"cloche.dev/agent/internal/wire"
)

const (
	// recordLimit is how much output of a detached command is kept.
	recordLimit = 1 << 20
	// segmentSize bounds one piece of a record.
	segmentSize = 16 << 10
	// segmentCost is what a piece counts besides its bytes, so that a
	// command that writes single bytes to both streams in turn does not
	// take many times the limit.
	segmentCost = 64
)

// record is the output of a detached command: the newest part, both streams
// in order. Any number of readers follow it, each at its own pace.
type record struct {
	mu       sync.Mutex
	segments []segment
	first    uint64 // offset of the oldest byte kept
	next     uint64 // offset behind the newest byte
	cost     int
	limit    int
	started  *wire.Started
	exited   *wire.Exit
	changed  chan struct{} // closed at the next change; nil if nobody waits
}

// segment is a run of bytes of one stream, or of dropped bytes.
type segment struct {
	stream byte
	offset uint64
	data   []byte
	gap    int64 // dropped bytes, instead of data
}

func (s *segment) end() uint64 { return s.offset + uint64(len(s.data)) + uint64(s.gap) }

func newRecord() *record { return &record{limit: recordLimit} }

func (r *record) begin(s wire.Started) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.started = &s
	r.wake()
}

// write never blocks: what is too old falls out.
func (r *record) write(stream byte, framed []byte) error {
	b := framed[wire.HeaderSize:]
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(b) > 0 {
		k := min(len(b), segmentSize)
		r.add(stream, b[:k])
		b = b[k:]
	}
	r.trim()
	r.wake()
	return nil
}

func (r *record) add(stream byte, b []byte) {
	if n := len(r.segments); n > 0 {
		last := &r.segments[n-1]
		if last.stream == stream && last.gap == 0 && len(last.data)+len(b) <= segmentSize {
			last.data = append(last.data, b...)
			r.next += uint64(len(b))
			r.cost += len(b)
			return
		}
	}
	r.push(segment{stream: stream, offset: r.next, data: append([]byte(nil), b...)})
}

func (r *record) push(s segment) {
	r.segments = append(r.segments, s)
	r.next = s.end()
	r.cost += len(s.data) + segmentCost
}

func (r *record) trim() {
	for r.cost > r.limit && len(r.segments) > 0 {
		s := &r.segments[0]
		r.cost -= len(s.data) + segmentCost
		r.first = s.end()
		s.data = nil
		r.segments = r.segments[1:]
	}
}

// shrink gives up memory of a finished record.
func (r *record) shrink(limit int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.limit = min(r.limit, limit)
	r.trim()
}

func (r *record) flush() {}

func (r *record) gap(stream byte, n int64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.push(segment{stream: stream, offset: r.next, gap: n})
	r.wake()
	return nil
}

func (r *record) exit(e wire.Exit) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.exited = &e
	r.wake()
	return nil
}

func (r *record) wake() {
	if r.changed != nil {
		close(r.changed)
		r.changed = nil
	}
}

// wait gives a channel that is closed at the next change. The lock is held.
func (r *record) wait() <-chan struct{} {
	if r.changed == nil {
		r.changed = make(chan struct{})
	}
	return r.changed
}

func (r *record) size() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.cost
}

func (r *record) offset() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.next
}
