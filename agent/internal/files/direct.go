package files

import (
	"io"
	"syscall"

	"cloche.dev/agent/internal/sys"
)

// fill writes all of body into fd, in large pieces.
func fill(fd int, body io.Reader) (int64, error) {
	out := sink{fd: fd}
	defer out.close()
	return out.fill(body)
}

// sink writes a file from front to end, a large one around the page cache.
type sink struct {
	fd     int
	done   int64
	direct bool
	tried  bool
}

func (s *sink) fill(body io.Reader) (int64, error) {
	bp := copyBuffers.Get().(*[]byte)
	defer copyBuffers.Put(bp)
	buf, used := *bp, 0
	var err error
	for err == nil {
		var n int
		n, err = body.Read(buf[used:])
		used += n
		if used < s.enough(len(buf)) && err == nil {
			continue
		}
		part := used
		if err == nil {
			part = sys.WholeBlocks(used)
		}
		if _, werr := s.write(buf[:part]); werr != nil {
			return s.done, werr
		}
		used = copy(buf, buf[part:used])
	}
	if err == io.EOF {
		err = nil
	}
	return s.done, err
}

func (s *sink) write(b []byte) (int, error) {
	if !s.tried && s.done >= sys.DirectAfter {
		s.tried = true
		s.direct = s.canBeDirect(b) && sys.SetDirect(s.fd, true) == nil
	}
	n := 0
	if s.direct {
		var err error
		if n, err = writeAll(s.fd, b[:sys.WholeBlocks(len(b))]); err != nil && err != syscall.EINVAL {
			s.done += int64(n)
			return n, err
		}
		if n < len(b) {
			s.close() // the end, or a file system that wants it otherwise
		}
	}
	more, err := writeAll(s.fd, b[n:])
	s.done += int64(n + more)
	return n + more, err
}

// enough is how many bytes of a buffer are worth a write.
func (s *sink) enough(size int) int {
	if s.direct {
		return size
	}
	return size / 2
}

// close leaves the descriptor as it was.
func (s *sink) close() {
	if s.direct {
		s.direct = false
		_ = sys.SetDirect(s.fd, false)
	}
}

func (s *sink) canBeDirect(b []byte) bool {
	at, err := syscall.Seek(s.fd, 0, io.SeekCurrent)
	return err == nil && sys.WholeBlocks(at) == at && sys.CanBeDirect(b)
}
