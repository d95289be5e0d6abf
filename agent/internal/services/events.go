package services

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"strconv"
	"strings"
	"time"

	"cloche.dev/agent/internal/wire"
)

// What is told of a service.
const (
	toldStarted   = "started"
	toldExited    = "exited"
	toldHealthy   = "healthy"
	toldUnhealthy = "unhealthy"
	toldGaveUp    = "gave_up"
)

const (
	// maxEvents bounds how many are kept, maxAnswer how many are told at once,
	// and maxDetail the reason of one.
	maxEvents = 256
	maxAnswer = 64
	maxDetail = 500
)

// Event is something that has happened to a service.
type Event struct {
	Place    string `json:"place"`
	Kind     string `json:"kind"`
	Name     string `json:"name"`
	AtNS     int64  `json:"at_ns"`
	PID      int    `json:"pid,omitempty"`
	Process  string `json:"process_id,omitempty"`
	ExitCode *int   `json:"exit_code,omitempty"`
	Signal   string `json:"signal,omitempty"`
	Detail   string `json:"detail,omitempty"`
	Restarts int    `json:"restarts"`
	RetryMS  int64  `json:"retry_ms,omitempty"`

	seq uint64
}

// Told is the answer to a question for events. Lost are those between the place
// that was asked for and the first of them that are not kept any more.
type Told struct {
	Events   []Event `json:"events"`
	Lost     uint64  `json:"lost"`
	Next     string  `json:"next"`
	Services int     `json:"services"`
}

// history is what has happened lately. An epoch begins whenever the machine
// goes on from a memory that was saved: what has happened before belongs to
// others too, who go on from the same memory. Numbers grow by one with each
// event, over all epochs. The manager's lock guards it.
type history struct {
	epoch  string
	mark   uint64 // number of the first event of the epoch
	next   uint64
	events []Event
}

// begin starts an epoch.
func (h *history) begin() {
	var b [8]byte
	_, _ = rand.Read(b[:])
	h.epoch, h.mark = hex.EncodeToString(b[:]), h.next
}

func (h *history) place(seq uint64) string { return h.epoch + "." + strconv.FormatUint(seq, 10) }

func (h *history) add(e Event) {
	e.seq, e.Place, e.AtNS = h.next, h.place(h.next), time.Now().UnixNano()
	if len(e.Detail) > maxDetail {
		e.Detail = strings.ToValidUTF8(e.Detail[:maxDetail], "")
	}
	h.next++
	if len(h.events) == maxEvents {
		h.events = append(h.events[:0], h.events[1:]...)
	}
	h.events = append(h.events, e)
}

// from is the number of the first event behind a place; behind one that is not
// of this history comes the present epoch.
func (h *history) from(after string) uint64 {
	for _, e := range h.events {
		if e.Place == after {
			return e.seq + 1
		}
	}
	epoch, number, _ := strings.Cut(after, ".")
	// One before the mark is the place at which an epoch begins.
	if seq, err := strconv.ParseUint(number, 10, 63); err == nil && epoch == h.epoch && seq+1 >= h.mark && seq < h.next {
		return seq + 1
	}
	return h.mark
}

// after tells what came behind a place.
func (h *history) after(after string) Told {
	from := h.from(after)
	t := Told{Events: []Event{}}
	for _, e := range h.events {
		if e.seq < from {
			continue
		}
		if len(t.Events) == 0 {
			t.Lost = e.seq - from
		}
		t.Events = append(t.Events, e)
		if len(t.Events) == maxAnswer {
			break
		}
	}
	switch n := len(t.Events); {
	case n > 0:
		t.Next = t.Events[n-1].Place
	case h.next > 0:
		t.Next = h.place(h.next - 1)
	}
	return t
}

// Events answers what came behind a place, once there is something or after so
// long.
func (m *Manager) Events(ctx context.Context, after string, limit time.Duration) Told {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for {
		m.mu.Lock()
		told := m.history.after(after)
		told.Services = len(m.all) + m.ending
		changed := m.changes()
		m.mu.Unlock()
		if len(told.Events) > 0 {
			return told
		}
		select {
		case <-changed:
		case <-timer.C:
			return told
		case <-ctx.Done():
			return told
		}
	}
}

// Renewed is for a machine that goes on from a memory that was saved.
func (m *Manager) Renewed() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.history.begin()
	m.tell()
}

// report tells of a service what is set by e. The lock is held.
func (m *Manager) report(s *service, kind string, e Event) {
	e.Kind, e.Name, e.Restarts = kind, s.name, s.restarts
	m.history.add(e)
	m.tell()
}

// reportEnd tells how a run has ended, and whether another one follows. The
// lock is held.
func (m *Manager) reportEnd(s *service, end outcome, retry time.Duration) {
	e := Event{Process: end.process, Detail: end.why, RetryMS: retry.Milliseconds()}
	if end.exit != nil {
		e.ExitCode, e.Signal = &end.exit.ExitCode, end.exit.Signal
	}
	m.report(s, toldExited, e)
}

// outcome is how a run has ended. exit is nil when it could not be started.
type outcome struct {
	failed  bool
	why     string
	process string
	exit    *wire.Exit
}
