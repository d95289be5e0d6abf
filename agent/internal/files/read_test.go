package files

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"cloche.dev/agent/internal/wire"
)

func largeFile(t *testing.T, size int) (string, []byte) {
	t.Helper()
	data := noise(rand.New(rand.NewPCG(7, uint64(size))), size)
	path := filepath.Join(t.TempDir(), "f")
	must(t, os.WriteFile(path, data, 0o600))
	return path, data
}

// sent keeps what is written, and how it came.
type sent struct {
	bytes.Buffer
	pieces []int
}

func (s *sent) Write(b []byte) (int, error) {
	s.pieces = append(s.pieces, len(b))
	return s.Buffer.Write(b)
}

// TestFilesAreSentWholeInFullPieces: of files and of parts of them, all pieces
// but the last are as large as a frame may be, and none is lost between two
// reads.
func TestFilesAreSentWholeInFullPieces(t *testing.T) {
	f := &FS{}
	for _, size := range []int{0, 1, wire.FullFrame, wire.FullFrame + 1, copySize + 1, 2*copySize - 1, 5<<20 - 1, 5 << 20} {
		path, data := largeFile(t, size)
		for _, r := range []*Range{nil, {0, -1}, {1, -1}, {copySize, -1}, {1<<20 + 77, 2 << 20}, {-1, 3<<20 + 5}} {
			c, err := f.Open(rootUser, path)
			must(t, err)
			want := data
			if r != nil {
				part, err := c.Cut(r)
				if err != nil {
					c.Close()
					continue
				}
				want = data[part.First : part.First+part.Count]
			}
			var out sent
			must(t, c.CopyTo(&out))
			c.Close()
			if !bytes.Equal(out.Bytes(), want) {
				t.Errorf("%d bytes, %+v: something else has come", size, r)
			}
			for i, n := range out.pieces[:max(len(out.pieces)-1, 0)] {
				if n != wire.FullFrame {
					t.Errorf("%d bytes, %+v: piece %d has %d bytes", size, r, i, n)
				}
			}
		}
	}
}

// TestAFileThatIsCut says that a file that is cut while it is sent is not whole.
func TestAFileThatIsCut(t *testing.T) {
	path, _ := largeFile(t, 4<<20)
	c, err := (&FS{}).Open(rootUser, path)
	must(t, err)
	defer c.Close()
	w := &cutter{t: t, path: path}
	if err := c.CopyTo(w); err != ErrShrunk {
		t.Errorf("got %v", err)
	}
}

type cutter struct {
	t    *testing.T
	path string
	n    int
}

func (c *cutter) Write(b []byte) (int, error) {
	if c.n += len(b); c.n > 2<<20 && c.path != "" {
		must(c.t, os.Truncate(c.path, 2<<20+100))
		c.path = ""
	}
	return len(b), nil
}
