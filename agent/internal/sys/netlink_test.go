package sys

import (
	"os"
	"runtime"
	"syscall"
	"testing"
)

func TestForeign(t *testing.T) {
	message := func(family byte, remote ...byte) []byte {
		b := make([]byte, 72)
		b[0] = family
		copy(b[diagMsgIDOffset+20:], remote)
		return b
	}
	mapped := func(last ...byte) []byte { return append([]byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff}, last...) }
	for _, tt := range []struct {
		name string
		data []byte
		want bool
	}{
		{"another machine", message(syscall.AF_INET, 192, 0, 2, 1), true},
		{"this machine", message(syscall.AF_INET, 127, 0, 0, 9), false},
		{"nobody", message(syscall.AF_INET), false},
		{"another machine, mapped", message(syscall.AF_INET6, mapped(192, 0, 2, 1)...), true},
		{"this machine, mapped", message(syscall.AF_INET6, mapped(127, 0, 0, 1)...), false},
		{"cut short", message(syscall.AF_INET, 192, 0, 2, 1)[:20], false},
	} {
		if got := foreign(tt.data, tt.data[0]) != nil; got != tt.want {
			t.Errorf("%s: got %v", tt.name, got)
		}
	}
}

// What it does to connections is shown on real machines; this is what it says
// where there are none.
func TestCutTCP(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can make a network namespace and destroy connections")
	}
	runtime.LockOSThread() // never unlocked: the thread ends with the test
	if err := syscall.Unshare(syscall.CLONE_NEWNET); err != nil {
		t.Skipf("no network namespace: %v", err)
	}
	if n, err := CutTCP(); err != nil || n != 0 {
		t.Fatalf("an empty machine: %d, %v", n, err)
	}
}
