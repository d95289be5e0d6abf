package files

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

// watching runs a watch and hands over what it says.
func watching(t *testing.T, f *FS, dir string, recursive bool, most int) chan WatchEvent {
	t.Helper()
	w, err := f.NewWatch(rootUser, dir, recursive, most)
	must(t, err)
	ctx, cancel := context.WithCancel(bg)
	events, done := make(chan WatchEvent, 10_000), make(chan struct{})
	go func() {
		defer close(done)
		defer close(events)
		_ = w.Run(ctx, func(v any) error {
			if e, ok := v.(WatchEvent); ok {
				events <- e
			}
			return nil
		})
	}()
	t.Cleanup(func() { cancel(); <-done })
	if e := <-events; e.Type != "ready" {
		t.Fatalf("got %+v", e)
	}
	return events
}

// until reads events up to one that looks like this: "type path [from]".
func until(t *testing.T, events chan WatchEvent, dir, want string) (seen []string) {
	t.Helper()
	for {
		select {
		case e, ok := <-events:
			if !ok {
				t.Fatalf("ended before %q: %q", want, seen)
			}
			one := strings.TrimSpace(e.Type + " " + strings.TrimPrefix(e.Path, dir+"/") + " " + strings.TrimPrefix(e.From, dir+"/"))
			seen = append(seen, one)
			if one == want {
				return seen
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("no %q: %q", want, seen)
		}
	}
}

func TestWatch(t *testing.T) {
	f, dir := setup(t)
	events := watching(t, f, dir, true, 100)
	must(t, os.WriteFile(dir+"/a", []byte("x"), 0o644))
	seen := until(t, events, dir, "modified a")
	if seen[0] != "created a" {
		t.Errorf("got %q", seen)
	}
	must(t, os.Rename(dir+"/a", dir+"/u/b"))
	until(t, events, dir, "moved u/b a")
	must(t, os.Chmod(dir+"/u/b", 0o600))
	until(t, events, dir, "attributes u/b")
	must(t, os.Remove(dir+"/u/b"))
	until(t, events, dir, "deleted u/b")
	// What comes from elsewhere, and what goes there.
	out := t.TempDir()
	must(t, os.MkdirAll(out+"/in/side", 0o755))
	if os.Rename(out+"/in", dir+"/in") == nil {
		until(t, events, dir, "created in")
		until(t, events, dir, "created in/side")
		must(t, os.WriteFile(dir+"/in/side/f", nil, 0o644))
		until(t, events, dir, "created in/side/f")
		must(t, os.Rename(dir+"/in", out+"/in"))
		until(t, events, dir, "deleted in")
	}
	must(t, os.Mkdir(dir+"/from", 0o755))
	until(t, events, dir, "created from")
	must(t, os.Rename(dir+"/from", dir+"/to"))
	until(t, events, dir, "moved to from")
	must(t, os.WriteFile(dir+"/to/f", nil, 0o644))
	until(t, events, dir, "created to/f")
	// An upload of ours is one appearance under its name.
	_, err := put(f, rootUser, dir+"/up", "x")
	must(t, err)
	seen = until(t, events, dir, "created up")
	if strings.Contains(strings.Join(seen, " "), "cloche-tmp") {
		t.Errorf("got %q", seen)
	}
	must(t, os.WriteFile(dir+"/bad\xff", nil, 0o644))
	for e := range events {
		if strings.Contains(e.Path, "bad") {
			if raw, err := B64.DecodeString(e.PathB64); err != nil || string(raw) != dir+"/bad\xff" {
				t.Errorf("got %+v", e)
			}
			break
		}
	}
	must(t, os.RemoveAll(dir))
	until(t, events, dir, "gone")
	if _, more := <-events; more {
		t.Error("something comes behind the end")
	}
}

func TestWatchMissesNothingInNewDirectories(t *testing.T) {
	f, dir := setup(t)
	events := watching(t, f, dir, true, 1000)
	for i := range 30 {
		d := fmt.Sprintf("%s/d%d/e/f", dir, i)
		must(t, os.MkdirAll(d, 0o755))
		must(t, os.WriteFile(d+"/file", []byte("x"), 0o644))
	}
	must(t, os.WriteFile(dir+"/last", nil, 0o644))
	created := map[string]int{}
	for len(created) < 30*4+1 {
		select {
		case e := <-events:
			if e.Type == "created" {
				created[e.Path]++
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("%d of 121", len(created))
		}
	}
	for path, n := range created {
		if n != 1 {
			t.Errorf("%s was told %d times", path, n)
		}
	}
}

func TestWatchBounds(t *testing.T) {
	f, dir := setup(t)
	if _, err := f.NewWatch(rootUser, dir, true, 1); code(err) != "too_many_watches" {
		t.Errorf("got %v", err)
	}
	for path, want := range map[string]string{dir + "/none": "not_found", "/etc/passwd": "not_a_directory"} {
		if _, err := f.NewWatch(rootUser, path, true, 10); code(err) != want {
			t.Errorf("%s: %v", path, err)
		}
	}
	must(t, os.Chmod(dir+"/u", 0o700))
	must(t, os.Chmod(dir, 0o700))
	if _, err := f.NewWatch(plainUser, dir, true, 10); code(err) != "permission_denied" {
		t.Errorf("got %v", err)
	}
	events := watching(t, f, dir, true, 3)
	must(t, os.MkdirAll(dir+"/1/2/3", 0o755))
	for e := range events {
		if e.Type == "error" && e.Code == "too_many_watches" {
			return
		}
	}
	t.Error("no error")
}

func TestASlowReaderOfAWatchLosesEventsAndIsTold(t *testing.T) {
	f, dir := setup(t)
	w, err := f.NewWatch(rootUser, dir, false, 1)
	must(t, err)
	for i := range 3 * watchQueue {
		w.push(WatchEvent{Type: "created", Path: fmt.Sprint(i)}, false)
	}
	events, _ := w.take()
	if len(events) != watchQueue+1 || events[watchQueue].Type != "overflow" {
		t.Errorf("%d events, the last %+v", len(events), events[len(events)-1])
	}
	_ = w.in.Close()
}
