package cgroup

import "testing"

func TestFindKey(t *testing.T) {
	text := []byte("low 0\nhigh 3\noom_kill 12\noom_group_kill 1\nbad x\n")
	for key, want := range map[string]int64{"oom_kill": 12, "low": 0, "missing": -1, "bad": -1, "oom": -1} {
		if got := findKey(text, key); got != want {
			t.Errorf("%s: %d", key, got)
		}
	}
}
