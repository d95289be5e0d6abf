package files

import (
	"bytes"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"cloche.dev/agent/internal/sys"
)

// pieces hands out its bytes in pieces of any size.
type pieces struct {
	left []byte
	rnd  *rand.Rand
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(p.left) == 0 {
		return 0, io.EOF
	}
	n := copy(b[:1+p.rnd.IntN(len(b))], p.left)
	p.left = p.left[n:]
	return n, nil
}

func noise(rnd *rand.Rand, size int) []byte {
	data := make([]byte, size)
	for i := range data {
		data[i] = byte(rnd.Uint32())
	}
	return data
}

// TestLargeFilesAreWhole writes files around the page cache, where the file
// system can do that, and checks every byte, what was before them, and that
// the descriptor is as it was.
func TestLargeFilesAreWhole(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	data := noise(rnd, 5<<20)
	for _, flags := range []int{os.O_RDWR, os.O_RDWR | os.O_APPEND} {
		for _, before := range []int{0, 1, 4096} {
			for _, size := range []int{0, 1, sys.DirectAfter - 1, sys.DirectAfter + 4096, len(data) - 4097, len(data) - 1, len(data)} {
				path := filepath.Join(t.TempDir(), "f")
				f, err := os.OpenFile(path, flags|os.O_CREATE, 0o600)
				if err != nil {
					t.Fatal(err)
				}
				_, _ = f.Write(data[:before])
				if n, err := fill(int(f.Fd()), &pieces{data[:size], rnd}); n != int64(size) || err != nil {
					t.Fatalf("%d of %d bytes: %v", n, size, err)
				}
				now, _, _ := syscall.Syscall(syscall.SYS_FCNTL, f.Fd(), syscall.F_GETFL, 0)
				if now&syscall.O_DIRECT != 0 {
					t.Error("the descriptor is not as it was")
				}
				got, _ := os.ReadFile(path)
				if !bytes.Equal(got[:before], data[:before]) || !bytes.Equal(got[before:], data[:size]) {
					t.Errorf("%d bytes behind %d, flags %#x: the file is another one", size, before, flags)
				}
				_ = f.Close()
			}
		}
	}
}

// TestDirectIsUsed says so when large files are not written around the cache
// where the file system has such a way.
func TestDirectIsUsed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := sys.SetDirect(int(f.Fd()), true); err != nil {
		t.Skipf("this file system cannot: %v", err)
	}
	_ = sys.SetDirect(int(f.Fd()), false)
	out := sink{fd: int(f.Fd())}
	if _, err := out.fill(&pieces{make([]byte, 4*sys.DirectAfter), rand.New(rand.NewPCG(3, 4))}); err != nil {
		t.Fatal(err)
	}
	if !out.tried || !out.direct {
		t.Errorf("tried %v, direct %v", out.tried, out.direct)
	}
	out.close()
}
