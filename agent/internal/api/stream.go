package api

import (
	"encoding/json"
	"net/http"
	"sync"
	"time"
)

const (
	streamBeat  = 8 * time.Second
	streamFlush = 200 * time.Millisecond
)

// lines is an answer of one JSON object a line, with a beat in any silence. What
// the reader does not take blocks the sender, and nothing is kept.
type lines struct {
	mu      sync.Mutex
	w       http.ResponseWriter
	flusher http.Flusher
	begun   bool
	closed  bool
	flushed time.Time
	timer   *time.Timer
}

func newLines(w http.ResponseWriter) *lines {
	l := &lines{w: w, flushed: time.Now()}
	l.flusher, _ = w.(http.Flusher)
	l.timer = time.AfterFunc(time.Hour, l.beat)
	l.timer.Reset(streamBeat)
	return l
}

// emit sends one line; nil sends what has not gone out yet.
func (l *lines) emit(v any) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if v == nil {
		l.flush()
		return nil
	}
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return l.write(append(b, '\n'))
}

func (l *lines) write(b []byte) error {
	if l.closed {
		return http.ErrHandlerTimeout
	}
	if !l.begun {
		l.begun = true
		h := l.w.Header()
		h["Content-Type"] = []string{"application/x-ndjson"}
		h["Date"] = nil
	}
	if _, err := l.w.Write(b); err != nil {
		return err
	}
	if time.Since(l.flushed) > streamFlush {
		l.flush()
	}
	return nil
}

func (l *lines) flush() {
	if !l.closed && l.begun {
		l.flusher.Flush()
		l.flushed = time.Now()
	}
}

// beat does not wait for a write that is stuck: nobody reads then.
func (l *lines) beat() {
	if l.mu.TryLock() {
		defer l.mu.Unlock()
		if l.closed {
			return
		}
		if time.Since(l.flushed) >= streamBeat-time.Second {
			_ = l.write([]byte("{\"type\":\"beat\"}\n"))
		}
		l.flush()
	}
	l.timer.Reset(streamBeat)
}

// end closes the answer of a call that has done its work, or tells its error: as
// an error of its own as long as nothing was sent.
func (l *lines) end(err error) error {
	l.mu.Lock()
	l.closed = true
	begun := l.begun
	l.mu.Unlock()
	l.timer.Stop()
	if err != nil && begun {
		// Too late for an answer: a reset tells the host that it is not whole.
		panic(http.ErrAbortHandler)
	}
	return err
}
