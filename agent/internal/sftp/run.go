package sftp

import (
	"syscall"

	"cloche.dev/agent/internal/sys"
)

// maxRun is how much of a file is gathered before it is written.
const maxRun = 512 << 10

// run is what a client has sent for one place of a file, in many writes each of
// which goes on where the one before has ended. It is written at once, around
// the page cache where the file is large, and only then answered.
type run struct {
	h   *handle
	at  int64
	buf []byte
	// What is to be answered, and how much of the run each of them ends at.
	ids  []uint32
	ends []int
}

// gather takes a write into the run, or into a new one. False: it is to be done
// by itself.
func (s *Server) gather(request []byte) (bool, error) {
	p := &in{b: request}
	id, name, offset, data := p.u32(), p.string(), p.u64(), p.bytes()
	h := s.handles[name]
	if p.err != nil || h == nil || h.dir || h.append || len(data) == 0 || len(data) > maxRun || int64(offset) < 0 {
		return false, nil
	}
	r := &s.run
	if r.h != h || r.at+int64(len(r.buf)) != int64(offset) || len(r.buf)+len(data) > maxRun {
		if err := s.endRun(); err != nil {
			return false, err
		}
	}
	if len(r.ids) == 0 {
		r.h, r.at = h, int64(offset)
	}
	r.buf = append(r.buf, data...)
	r.ids, r.ends = append(r.ids, id), append(r.ends, len(r.buf))
	return true, nil
}

// endRun writes what was gathered, and answers.
func (s *Server) endRun() error {
	r := &s.run
	if len(r.ids) == 0 {
		return nil
	}
	done, err := r.write()
	for i, id := range r.ids {
		var failed error
		if r.ends[i] > done {
			failed = err
		}
		c, text := code(failed)
		s.o.begin(fxpStatus, id).u32(c).string(text).string("")
		if _, err := s.w.Write(s.o.done()); err != nil {
			return err
		}
	}
	r.h, r.buf, r.ids, r.ends = nil, r.buf[:0], r.ids[:0], r.ends[:0]
	return nil
}

func (r *run) write() (int, error) {
	whole := sys.WholeBlocks(len(r.buf))
	done := 0
	if whole > 0 && r.at >= sys.DirectAfter && sys.WholeBlocks(r.at) == r.at && sys.CanBeDirect(r.buf) && sys.SetDirect(r.h.fd, true) == nil {
		var err error
		done, err = r.h.write(r.buf[:whole], r.at)
		_ = sys.SetDirect(r.h.fd, false)
		if err != nil && err != syscall.EINVAL {
			return done, err
		}
	}
	n, err := r.h.write(r.buf[done:], r.at+int64(done))
	return done + n, err
}
