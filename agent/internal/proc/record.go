package proc

import (
	"sync"

	"cloche.dev/agent/internal/wire"
)

const (
	// recordLimit is how much output of a detached command is kept, unless it
	// was started with another limit.
	recordLimit = 1 << 20
	// runningBudget bounds the output of all running commands together: beyond
	// it a command that writes keeps no more than its share.
	runningBudget = 32 << 20
	minShare      = 16 << 10
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
	// The same of each stream alone.
	firstOf, nextOf [3]uint64
	pool            *pool // nil when the command has ended
	cost            int
	limit           int
	started         *wire.Started
	exited          *wire.Exit
	changed         chan struct{} // closed at the next change; nil if nobody waits
}

// segment is a run of bytes of one stream, or of dropped bytes.
type segment struct {
	stream byte
	offset uint64
	own    uint64 // offset among the bytes of its stream
	data   []byte
	gap    int64 // dropped bytes, instead of data
}

func (s *segment) end() uint64 { return s.offset + uint64(len(s.data)) + uint64(s.gap) }

func (s *segment) ownEnd() uint64 { return s.own + s.end() - s.offset }

// pool is what the records of all running commands share.
type pool struct {
	mu     sync.Mutex
	used   int
	shares int
}

func (p *pool) add(cost, shares int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.used += cost
	p.shares += shares
}

// allows is the limit of a record that wants this one.
func (p *pool) allows(limit int) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.used <= runningBudget {
		return limit
	}
	return min(limit, max(runningBudget/max(p.shares, 1), minShare))
}

func newRecord() *record { return &record{limit: recordLimit} }

// newRecord makes the record of a command; limit 0 is the usual one.
func (m *Manager) newRecord(limit int) *record {
	r := newRecord()
	if limit > 0 {
		r.limit = limit
	}
	r.pool = &m.records
	r.pool.add(0, 1)
	return r
}

// release takes the record out of what running commands share. It may be
// called twice.
func (r *record) release() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.pool != nil {
		r.pool.add(-r.cost, -1)
		r.pool = nil
	}
}

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
	before := r.cost
	for len(b) > 0 {
		k := min(len(b), r.piece())
		r.add(stream, b[:k])
		b = b[k:]
	}
	r.account(before)
	r.wake()
	return nil
}

// piece bounds a segment. What is too old falls out by whole segments, so that
// a small record has small ones: one that is larger than the record would
// leave nothing at all.
func (r *record) piece() int { return max(min(segmentSize, r.limit/4), 4*segmentCost) }

func (r *record) add(stream byte, b []byte) {
	if n := len(r.segments); n > 0 {
		last := &r.segments[n-1]
		if last.stream == stream && last.gap == 0 && len(last.data)+len(b) <= r.piece() {
			last.data = append(last.data, b...)
			r.next += uint64(len(b))
			r.nextOf[stream] += uint64(len(b))
			r.cost += len(b)
			return
		}
	}
	r.push(segment{stream: stream, offset: r.next, data: append([]byte(nil), b...)})
}

func (r *record) push(s segment) {
	s.own = r.nextOf[s.stream]
	r.nextOf[s.stream] = s.ownEnd()
	r.segments = append(r.segments, s)
	r.next = s.end()
	r.cost += len(s.data) + segmentCost
}

// account keeps the record within its limit, and tells the others what it takes.
func (r *record) account(before int) {
	limit := r.limit
	if r.pool != nil {
		limit = r.pool.allows(limit)
	}
	r.trim(limit)
	if r.pool != nil {
		r.pool.add(r.cost-before, 0)
	}
}

func (r *record) trim(limit int) {
	for r.cost > limit && len(r.segments) > 0 {
		s := &r.segments[0]
		r.cost -= len(s.data) + segmentCost
		r.first = s.end()
		r.firstOf[s.stream] = s.ownEnd()
		s.data = nil
		r.segments = r.segments[1:]
	}
}

// shrink gives up memory of a finished record.
func (r *record) shrink(limit int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.limit = min(r.limit, limit)
	r.trim(r.limit)
}

func (r *record) flush() {}

func (r *record) gap(stream byte, n int64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	before := r.cost
	r.push(segment{stream: stream, offset: r.next, gap: n})
	r.account(before)
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

// offset counts the bytes of one stream, or with 0 of both.
func (r *record) offset(stream byte) uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if stream != 0 {
		return r.nextOf[stream]
	}
	return r.next
}

// extent describes what is kept.
func (r *record) extent() Extent {
	r.mu.Lock()
	defer r.mu.Unlock()
	return Extent{First: r.first, Stdout: r.nextOf[wire.TypeStdout], Stderr: r.nextOf[wire.TypeStderr]}
}

// at gives the bytes of each stream before an offset of both; nil where that is
// not known. The lock is held.
func (r *record) at(pos uint64) (out, err *uint64) {
	if pos < r.first {
		return nil, nil
	}
	own := r.firstOf
	for i := range r.segments {
		s := &r.segments[i]
		if s.offset >= pos {
			break
		}
		own[s.stream] = s.own + min(s.end(), pos) - s.offset
	}
	return &own[wire.TypeStdout], &own[wire.TypeStderr]
}
