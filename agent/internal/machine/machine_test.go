package machine

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestHostsWith(t *testing.T) {
	tests := []struct{ old, want string }{
		{"", "127.0.0.1\tlocalhost\n::1\tlocalhost\n127.0.1.1\tbox\n"},
		{"127.0.0.1 localhost", "127.0.0.1 localhost\n127.0.1.1\tbox\n"},
		{"127.0.1.1 old old.lan\n# x\n127.0.1.1 twice\n10.0.0.1 a\n", "127.0.1.1\tbox\n# x\n10.0.0.1 a\n"},
		{"  127.0.1.1\told\n", "127.0.1.1\tbox\n"},
	}
	for _, tt := range tests {
		if got := hostsWith(tt.old, "box"); got != tt.want {
			t.Errorf("%q: got %q", tt.old, got)
		}
	}
}

func TestSetContent(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	inode := func() uint64 {
		var st syscall.Stat_t
		if err := syscall.Lstat(path, &st); err != nil {
			t.Fatal(err)
		}
		return st.Ino
	}
	check := func(content string) {
		t.Helper()
		if err := setContent(path, content); err != nil {
			t.Fatal(err)
		}
		if got := contentOf(path); got != content {
			t.Errorf("got %q, want %q", got, content)
		}
	}
	check("one\n")
	first := inode()
	check("two\n")
	if inode() != first {
		t.Error("the same size makes a new file")
	}
	check("longer\n")
	check("\n")
	_ = os.Remove(path)
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := contentOf(path); got != "" {
		t.Errorf("a pipe holds %q", got)
	}
	check("file\n")
	other := filepath.Join(dir, "other")
	if err := os.WriteFile(other, []byte("mine\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_ = os.Remove(path)
	_ = os.Symlink(other, path)
	check("ours\n")
	if got := contentOf(other); got != "mine\n" {
		t.Errorf("a link was followed: %q", got)
	}
}

func TestRenewCheck(t *testing.T) {
	negative := int64(-1)
	good := &Renew{Entropy: make([]byte, 32), Hostname: "a-1", MachineID: strings.Repeat("a0", 16)}
	if err := good.Check(); err != nil {
		t.Error(err)
	}
	for name, r := range map[string]*Renew{
		"short entropy": {Entropy: make([]byte, 31)}, "long entropy": {Entropy: make([]byte, 513)},
		"no entropy": {Entropy: []byte{}}, "time": {TimeNS: &negative}, "upper case": {Hostname: "A"},
		"long name": {Hostname: strings.Repeat("a", 64)}, "blank": {Hostname: "a b"},
		"machine id": {MachineID: strings.Repeat("g", 32)}, "short id": {MachineID: "ab"},
		"authority": {CAPEM: "ab"},
	} {
		if r.Check() == nil {
			t.Errorf("%s was accepted", name)
		}
	}
}

func TestLimits(t *testing.T) {
	l := Limits()
	if total := MemTotal(); l.MemoryMax > total-24<<20 || l.MemoryMax < total/2 || l.PidsMax < 512 {
		t.Errorf("%+v of %d", l, total)
	}
}
