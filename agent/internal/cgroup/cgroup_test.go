package cgroup

import (
	"errors"
	"os"
	"testing"
	"time"
)

// TestFreezeInVain has files that no kernel stands behind.
func TestFreezeInVain(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"cgroup.kill": "", "cgroup.events": "populated 1\nfrozen 0\n"} {
		if err := os.WriteFile(dir+"/"+name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	m, err := New(dir, Limits{})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Freeze(time.Now().Add(20 * time.Millisecond)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	if b, _ := os.ReadFile(dir + "/cgroup.freeze"); string(b) != "0" {
		t.Errorf("it is left at %q", b)
	}
	_ = os.WriteFile(dir+"/cgroup.events", []byte("populated 1\nfrozen 1\n"), 0o600)
	if err := m.Freeze(time.Now().Add(20 * time.Millisecond)); err != nil {
		t.Error(err)
	}
	if b, _ := os.ReadFile(dir + "/cgroup.freeze"); string(b) != "1" {
		t.Errorf("it is left at %q", b)
	}
}

func TestFindKey(t *testing.T) {
	text := []byte("low 0\nhigh 3\noom_kill 12\noom_group_kill 1\nbad x\n")
	for key, want := range map[string]int64{"oom_kill": 12, "low": 0, "missing": -1, "bad": -1, "oom": -1} {
		if got := findKey(text, key); got != want {
			t.Errorf("%s: %d", key, got)
		}
	}
}
