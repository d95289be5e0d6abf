// Package sftp is a server of the file transfer protocol of SSH, version 3 with
// the extensions of OpenSSH, on the standard streams of an ordinary process. It
// may do what its user may, and does it with plain system calls: names are
// bytes, reads and writes go to any offset of any file.
package sftp

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
	"slices"
	"strconv"
	"syscall"
)

const (
	// maxPacket bounds what a client may send at once, and what it is sent.
	maxPacket = 256 << 10
	// maxData is what one read or write moves: whole blocks; the rest is for the
	// head.
	maxData = maxPacket - 4096
	// maxHandles bounds open files.
	maxHandles = 1024
	// listBatch is how many names come in one answer.
	listBatch = 100
)

// errEnd is the end of a file or a list.
var errEnd = errors.New("end")

// handle is an open file or directory.
type handle struct {
	fd     int
	append bool
	list   []string // of a directory: what was read and not told yet
	dir    bool
	path   string
}

// Server is one client's.
type Server struct {
	r       *bufio.Reader
	w       *bufio.Writer
	handles map[string]*handle
	next    uint64
	names   names
	o       out
	entries [32 << 10]byte // of a directory, as the kernel gives them
	run     run
	// plain: a request for a link has the fields in the order of the draft and
	// not in that of OpenSSH.
	plain bool
}

// Serve answers until the client has no more requests. One after the other, in
// their order, which is what clients that send many at once rely on. plain: the
// client names a new link first, and then what it says.
func Serve(r io.Reader, w io.Writer, plain bool) error {
	home()
	s := &Server{
		plain: plain,
		r:     bufio.NewReaderSize(r, maxRun), w: bufio.NewWriterSize(w, 64<<10),
		handles: map[string]*handle{},
		names:   names{map[uint32]string{}, map[uint32]string{}},
		run:     run{buf: make([]byte, 0, maxRun)},
	}
	defer s.closeAll()
	packet := make([]byte, maxPacket)
	for {
		var head [4]byte
		if err := s.fill(head[:]); err != nil {
			return ended(err)
		}
		n := binary.BigEndian.Uint32(head[:])
		if n == 0 || n > maxPacket {
			_ = s.answerAll()
			return errors.New("a packet of an impossible length")
		}
		if err := s.fill(packet[:n]); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
		if packet[0] == fxpWrite {
			gathered, err := s.gather(packet[1:n])
			if err != nil {
				return err
			}
			if gathered {
				continue
			}
		}
		if err := s.endRun(); err != nil {
			return err
		}
		if _, err := s.w.Write(s.answer(packet[0], &in{b: packet[1:n]})); err != nil {
			return err
		}
	}
}

// fill reads so many bytes. The client gets its answers before it is waited for.
func (s *Server) fill(b []byte) error {
	if s.r.Buffered() < len(b) {
		if err := s.answerAll(); err != nil {
			return err
		}
	}
	_, err := io.ReadFull(s.r, b)
	return err
}

// answerAll does what was put off, and sends every answer.
func (s *Server) answerAll() error { return errors.Join(s.endRun(), s.w.Flush()) }

func ended(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

func (s *Server) closeAll() {
	for _, h := range s.handles {
		_ = syscall.Close(h.fd)
	}
}

func (s *Server) answer(typ byte, p *in) []byte {
	if typ == fxpInit {
		s.o.b = append(s.o.b[:0], 0, 0, 0, 0, fxpVersion)
		s.o.u32(3)
		for _, e := range [][2]string{
			{"posix-rename@openssh.com", "1"}, {"statvfs@openssh.com", "2"}, {"fstatvfs@openssh.com", "2"},
			{"hardlink@openssh.com", "1"}, {"fsync@openssh.com", "1"}, {"lsetstat@openssh.com", "1"},
			{"limits@openssh.com", "1"}, {"expand-path@openssh.com", "1"},
		} {
			s.o.string(e[0]).string(e[1])
		}
		return s.o.done()
	}
	id := p.u32()
	answered, err := s.do(typ, id, p)
	if p.err != nil {
		answered, err = false, p.err
	}
	if !answered {
		c, text := code(err)
		s.o.begin(fxpStatus, id).u32(c).string(text).string("")
	}
	return s.o.done()
}

// do carries one request out. False: the answer is the status of the error.
func (s *Server) do(typ byte, id uint32, p *in) (bool, error) {
	switch typ {
	case fxpOpen:
		return s.open(id, p)
	case fxpClose:
		return false, s.close(p.string())
	case fxpRead:
		return s.read(id, p)
	case fxpWrite:
		return false, s.write(p)
	case fxpLstat, fxpStat, fxpFstat:
		return s.stat(typ, id, p)
	case fxpSetstat:
		path, a := p.string(), p.attrs()
		if p.err != nil {
			return false, p.err
		}
		return false, a.apply(path, false)
	case fxpFsetstat:
		return false, s.fsetstat(p)
	case fxpOpendir:
		return s.opendir(id, p)
	case fxpReaddir:
		return s.readdir(id, p)
	case fxpRealpath:
		return s.realpath(id, p.string())
	case fxpReadlink:
		return s.readlink(id, p.string())
	case fxpExtended:
		return s.extended(id, p)
	case fxpRemove, fxpRmdir, fxpMkdir, fxpRename, fxpSymlink:
		return false, s.change(typ, p)
	}
	return false, errors.ErrUnsupported
}

func (s *Server) add(id uint32, h *handle) (bool, error) {
	s.next++
	name := strconv.FormatUint(s.next, 10)
	s.handles[name] = h
	s.o.begin(fxpHandle, id).string(name)
	return true, nil
}

func (s *Server) find(name string, dir bool) (*handle, error) {
	h := s.handles[name]
	if h == nil || h.dir != dir {
		return nil, syscall.EBADF
	}
	return h, nil
}

func (s *Server) close(name string) error {
	h := s.handles[name]
	if h == nil {
		return syscall.EBADF
	}
	delete(s.handles, name)
	return syscall.Close(h.fd)
}

func (s *Server) open(id uint32, p *in) (bool, error) {
	path, want, a := p.string(), p.u32(), p.attrs()
	if p.err != nil {
		return false, p.err
	}
	if len(s.handles) >= maxHandles {
		return false, syscall.EMFILE
	}
	// A FIFO without a writer must not stop everything else.
	flags := syscall.O_CLOEXEC | syscall.O_NONBLOCK | syscall.O_NOCTTY
	switch want & (openRead | openWrite) {
	case openRead | openWrite:
		flags |= syscall.O_RDWR
	case openWrite:
		flags |= syscall.O_WRONLY
	case openRead:
	default:
		return false, syscall.EINVAL
	}
	for bit, flag := range map[uint32]int{
		openAppend: syscall.O_APPEND, openCreate: syscall.O_CREAT, openTrunc: syscall.O_TRUNC, openExcl: syscall.O_EXCL,
	} {
		if want&bit != 0 {
			flags |= flag
		}
	}
	mode := uint32(0o666)
	if a.flags&attrMode != 0 {
		mode = a.mode & 0o7777
	}
	fd, err := syscall.Open(path, flags, mode)
	if err != nil {
		return false, err
	}
	return s.add(id, &handle{fd: fd, append: want&openAppend != 0})
}

func (s *Server) read(id uint32, p *in) (bool, error) {
	name, offset, count := p.string(), p.u64(), p.u32()
	h, err := s.find(name, false)
	if err != nil || p.err != nil {
		return false, err
	}
	// Straight into the answer: a copy of it would be as much work again.
	s.o.begin(fxpData, id).u32(0)
	head := len(s.o.b)
	s.o.b = slices.Grow(s.o.b, maxData)
	room := s.o.b[head : head+int(min(count, maxData))]
	n, err := syscall.Pread(h.fd, room, int64(offset))
	for err == syscall.EINTR {
		n, err = syscall.Pread(h.fd, room, int64(offset))
	}
	switch {
	case err != nil:
		return false, err
	case n == 0 && count > 0:
		return false, errEnd
	}
	binary.BigEndian.PutUint32(s.o.b[head-4:], uint32(n))
	s.o.b = s.o.b[:head+n]
	return true, nil
}

func (s *Server) write(p *in) error {
	name, offset, data := p.string(), p.u64(), p.bytes()
	h, err := s.find(name, false)
	if err != nil || p.err != nil {
		return err
	}
	_, err = h.write(data, int64(offset))
	return err
}

// write writes all of data, or says how much of it.
func (h *handle) write(data []byte, at int64) (int, error) {
	done := 0
	for done < len(data) {
		var n int
		var err error
		if h.append {
			n, err = syscall.Write(h.fd, data[done:])
		} else {
			n, err = syscall.Pwrite(h.fd, data[done:], at+int64(done))
		}
		if err == syscall.EINTR {
			continue
		}
		if err == nil && n == 0 {
			err = syscall.EIO // or it would be tried for ever
		}
		if err != nil {
			return done, err
		}
		done += n
	}
	return done, nil
}

func (s *Server) stat(typ byte, id uint32, p *in) (bool, error) {
	var st syscall.Stat_t
	var err error
	name := p.string()
	switch typ {
	case fxpStat:
		err = syscall.Stat(name, &st)
	case fxpLstat:
		err = syscall.Lstat(name, &st)
	default:
		h := s.handles[name]
		if h == nil {
			return false, syscall.EBADF
		}
		err = syscall.Fstat(h.fd, &st)
	}
	if err != nil {
		return false, err
	}
	s.o.begin(fxpAttrs, id).stat(&st)
	return true, nil
}

func (s *Server) fsetstat(p *in) error {
	name, a := p.string(), p.attrs()
	h := s.handles[name]
	if h == nil || p.err != nil {
		return syscall.EBADF
	}
	return a.applyTo(h.fd)
}
