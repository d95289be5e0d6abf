package proc

import (
	"encoding/json"
	"net/http"
	"sync"
	"time"

	"cloche.dev/agent/internal/wire"
)

const (
	// heartbeatEvery keeps the silence below the 10 s of the protocol.
	heartbeatEvery = 8 * time.Second
	// startedDelay is how long the first event may wait for company: a
	// command that ends at once then costs one packet instead of two, and is
	// not interrupted.
	startedDelay = 30 * time.Millisecond
)

// frameWriter writes the frames of one exec stream to its HTTP answer. A
// reader that does not read blocks it, and so the command, and nothing else.
type frameWriter struct {
	mu      sync.Mutex
	w       http.ResponseWriter
	flusher http.Flusher
	timer   *time.Timer
	offset  uint64
	dirty   bool
	closed  bool
	last    time.Time
	err     error
}

func newFrameWriter(w http.ResponseWriter) *frameWriter {
	f := &frameWriter{w: w, last: time.Now()}
	f.flusher, _ = w.(http.Flusher)
	// It exists before it may fire: tick uses it without the lock.
	f.timer = time.AfterFunc(time.Hour, f.tick)
	f.timer.Stop()
	h := w.Header()
	h["Content-Type"] = []string{wire.ContentType}
	h["Date"] = nil // the guest's clock is nothing to go by
	return f
}

// started must be the first call.
func (f *frameWriter) started(s wire.Started) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.timer.Reset(startedDelay)
	return f.event(wire.TypeStarted, s)
}

func (f *frameWriter) write(stream byte, framed []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := len(framed) - wire.HeaderSize
	wire.PutHeader(framed, stream, f.offset, n)
	f.offset += uint64(n)
	return f.send(framed)
}

func (f *frameWriter) gap(stream byte, n int64) error {
	return f.lost(wire.Gap{Stream: int(stream), Bytes: n})
}

func (f *frameWriter) lost(g wire.Gap) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	err := f.event(wire.TypeGap, g)
	f.offset += uint64(g.Bytes)
	return err
}

// exit sends the last event. It is left to the end of the HTTP answer to flush
// it, which takes one packet less.
func (f *frameWriter) exit(e wire.Exit) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	err := f.event(wire.TypeExit, e)
	f.stop()
	return err
}

// close ends the use of the HTTP answer: nothing may touch it after the
// handler has returned.
func (f *frameWriter) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.stop()
}

func (f *frameWriter) stop() {
	f.closed = true
	f.timer.Stop()
}

func (f *frameWriter) event(typ byte, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return f.send(wire.AppendFrame(nil, typ, f.offset, b))
}

func (f *frameWriter) send(b []byte) error {
	if f.closed {
		return http.ErrHandlerTimeout
	}
	if f.err == nil {
		_, f.err = f.w.Write(b)
		f.dirty = true
		f.last = time.Now()
	}
	return f.err
}

func (f *frameWriter) flush() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.flushLocked()
}

func (f *frameWriter) flushLocked() {
	if f.dirty && !f.closed && f.err == nil {
		f.dirty = false
		f.flusher.Flush()
	}
}

// tick flushes what nobody has flushed, and fills a silence with heartbeats. It
// does not wait for a write that is stuck: the host is not reading then.
func (f *frameWriter) tick() {
	if !f.mu.TryLock() {
		f.timer.Reset(heartbeatEvery)
		return
	}
	defer f.mu.Unlock()
	if f.closed {
		return
	}
	if time.Since(f.last) >= heartbeatEvery-time.Second {
		_ = f.send(wire.AppendFrame(nil, wire.TypeHeartbeat, f.offset, nil))
	}
	f.flushLocked()
	if f.err == nil {
		f.timer.Reset(max(heartbeatEvery-time.Since(f.last), 10*time.Millisecond))
	}
}
