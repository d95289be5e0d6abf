package services

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func kinds(t Told) string {
	var out []string
	for _, e := range t.Events {
		out = append(out, e.Name)
	}
	return strings.Join(out, " ")
}

func filled(names string) *history {
	h := &history{}
	h.begin()
	for _, name := range strings.Fields(names) {
		h.add(Event{Name: name})
	}
	return h
}

func TestEventsGoOnBehindAPlace(t *testing.T) {
	h := filled("a b c")
	all := h.after("")
	if kinds(all) != "a b c" || all.Lost != 0 || all.Next != all.Events[2].Place {
		t.Fatalf("got %+v", all)
	}
	if got := h.after(all.Events[0].Place); kinds(got) != "b c" || got.Lost != 0 {
		t.Errorf("got %+v", got)
	}
	end := h.after(all.Next)
	if len(end.Events) != 0 || end.Events == nil || end.Next != all.Next {
		t.Errorf("got %+v", end)
	}
	h.add(Event{Name: "d"})
	if got := h.after(end.Next); kinds(got) != "d" {
		t.Errorf("got %+v", got)
	}
	for _, odd := range []string{"x", ".", h.epoch, h.epoch + ".", h.epoch + ".99", h.epoch + ".-1", "0.0"} {
		if got := h.after(odd); kinds(got) != "a b c d" {
			t.Errorf("behind %q: %+v", odd, got)
		}
	}
}

// TestEventsOfCopies has one memory go on several times, as forks and restores have it.
func TestEventsOfCopies(t *testing.T) {
	h := filled("a b")
	place := h.after("").Next
	h.begin()
	h.add(Event{Name: "c"})
	if got := h.after(""); kinds(got) != "c" || got.Lost != 0 {
		t.Errorf("a copy tells of what it has not done: %+v", got)
	}
	if got := h.after(place); kinds(got) != "c" {
		t.Errorf("whoever knew it goes on where it was: %+v", got)
	}
	// Taken back to a time before the event that the reader has seen last.
	other := filled("a b")
	if got := h.after(other.after("").Next); kinds(got) != "c" {
		t.Errorf("a place of another history: %+v", got)
	}
	// The place at which an epoch without events begins.
	h.begin()
	empty := h.after("")
	h.add(Event{Name: "d"})
	if got := h.after(empty.Next); kinds(got) != "d" {
		t.Errorf("got %+v", got)
	}
}

func TestEventsAreBounded(t *testing.T) {
	h := filled("first")
	place := h.after("").Next
	for range maxEvents + 10 {
		h.add(Event{Name: "x", Detail: strings.Repeat("ä", 400)})
	}
	if len(h.events) != maxEvents || cap(h.events) > 2*maxEvents {
		t.Errorf("it keeps %d, and has room for %d", len(h.events), cap(h.events))
	}
	seen, lost := 0, uint64(0)
	for {
		got := h.after(place)
		if len(got.Events) == 0 {
			break
		}
		seen, lost, place = seen+len(got.Events), lost+got.Lost, got.Next
	}
	if seen != maxEvents || lost != 10 {
		t.Errorf("told %d, and %d lost", seen, lost)
	}
	if d := h.events[0].Detail; len(d) > maxDetail || !utf8.ValidString(d) {
		t.Errorf("a detail of %d bytes", len(d))
	}
}

// TestAnEarlierStartEndsNoBackoff asks for a start while it runs.
func TestAnEarlierStartEndsNoBackoff(t *testing.T) {
	r := &running{kick: make(chan struct{}, 1)}
	r.kick <- struct{}{}
	r.drain()
	r.drain()
	if len(r.kick) != 0 {
		t.Error("it would be started again at once")
	}
}
