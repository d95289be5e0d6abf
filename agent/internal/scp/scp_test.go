package scp

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"cloche.dev/agent/internal/testhost"
)

// run is the far side of a copy inside of dir, which is told what to say.
func run(t testing.TB, dir, says string, args ...string) (int, string) {
	t.Helper()
	var out bytes.Buffer
	status := -1
	testhost.Jail(t, dir, func() { status = Run(args, strings.NewReader(says), &out) })
	return status, out.String()
}

func TestReceive(t *testing.T) {
	dir := t.TempDir()
	status, out := run(t, dir, "T7 0 8 0\nD0750 0 d\nC0640 3 f\nabc\x00E\nC0600 0 empty\n\x00", "-t", "-r", "-p", "--", "/")
	if status != 0 || strings.Trim(out, "\x00") != "" {
		t.Fatalf("%d %q", status, out)
	}
	b, err := os.ReadFile(filepath.Join(dir, "d/f"))
	info, _ := os.Stat(filepath.Join(dir, "d"))
	if string(b) != "abc" || err != nil || info.Mode().Perm() != 0o750 || info.ModTime().Unix() != 7 {
		t.Errorf("%q %v %v", b, err, info)
	}
}

// TestReceiveNonsense has a sender that would leave the target, or says what is
// none of the protocol: nothing is written.
func TestReceiveNonsense(t *testing.T) {
	for _, says := range []string{
		"C0644 1 ../x\na\x00", "C0644 1 /x\na\x00", "C0644 1 ..\na\x00", "C0644 1 .\na\x00", "C0644 1 \na\x00",
		"C0644 -1 x\n", "C99999 1 x\na\x00", "C0644 99999999999999999999 x\n", "C0644 x\n", "D0755 0 x\n", "E\n", "Zx\n",
		"T1 2 3\n", "T-1 0 0 0\n", "\n", "\x02over\n", strings.Repeat("C", 1<<17), "C0644 5 x",
	} {
		dir := t.TempDir()
		if status, _ := run(t, dir, says, "-t", "/"); status == 0 {
			t.Errorf("%.40q was taken", says)
		}
		if left, _ := os.ReadDir(dir); len(left) != 0 {
			t.Errorf("%.40q has left %v", says, left)
		}
	}
}

func TestReceiveCutShort(t *testing.T) {
	dir := t.TempDir()
	if status, _ := run(t, dir, "C0644 10 x\nabc", "-t", "/"); status == 0 {
		t.Error("a file that is cut short was taken for whole")
	}
	deep := strings.Repeat("D0755 0 d\n", deepest+1)
	if status, _ := run(t, dir, deep, "-t", "-r", "/"); status == 0 {
		t.Error("a tree without a bottom was taken")
	}
}

func TestSend(t *testing.T) {
	dir := t.TempDir()
	_ = os.Mkdir(filepath.Join(dir, "d"), 0o755)
	_ = os.WriteFile(filepath.Join(dir, "d/f"), []byte("abc"), 0o644)
	_ = os.WriteFile(filepath.Join(dir, "d/with\nfeed"), nil, 0o644)
	_ = syscall.Mkfifo(filepath.Join(dir, "d/fifo"), 0o600)
	status, out := run(t, dir, strings.Repeat("\x00", 20), "-f", "-r", "/d")
	if status != 1 || !strings.Contains(out, "D0755 0 d\n") || !strings.Contains(out, "C0644 3 f\nabc\x00") ||
		!strings.Contains(out, "not a regular file") || !strings.HasSuffix(out, "E\n") {
		t.Errorf("%d %q", status, out)
	}
	if status, out = run(t, dir, "\x00\x01no\n\x00", "-f", "/d/f"); status != 1 || strings.Contains(out, "abc") {
		t.Errorf("refused: %d %q", status, out)
	}
	if status, out = run(t, dir, "\x02over\n", "-f", "/d/f"); status != 1 || out != "" {
		t.Errorf("ended: %d %q", status, out)
	}
}

func TestArguments(t *testing.T) {
	for _, args := range [][]string{{}, {"-t"}, {"-f"}, {"-t", "-f", "x"}, {"-t", "a", "b"}, {"-X", "-t", "a"}, {"x"}} {
		if status, _ := run(t, t.TempDir(), "", args...); status != 2 {
			t.Errorf("%q: %d", args, status)
		}
	}
}

// FuzzReceive feeds anything to the receiving side. What it makes is inside of
// its target, and it ends.
func FuzzReceive(f *testing.F) {
	f.Add("C0644 3 f\nabc\x00")
	f.Add("T7 0 8 0\nD0750 0 d\nC0640 3 f\nabc\x00E\n")
	f.Add("\x01warning\n\x02over\n")
	f.Fuzz(func(t *testing.T, says string) {
		dir := t.TempDir()
		_ = os.Mkdir(filepath.Join(dir, "target"), 0o755)
		run(t, dir, says, "-t", "-r", "-p", "/target")
		if left, _ := os.ReadDir(dir); len(left) != 1 {
			t.Errorf("it has left %v", left)
		}
	})
}
