package link

import (
	"context"
	"io"
	"log"
	"net"
	"sync"
	"time"

	"cloche.dev/agent/internal/wire"
)

// session is one HTTP/2 connection on a link. It lives from a preface to a
// hang-up, or to the first bytes that cannot be HTTP/2. Those bytes stay in the
// link's buffer: they are usually the synchronisation line of a host that
// has connected again so fast that no hang-up was to be seen.
type session struct {
	link   *Link
	ctx    context.Context
	cancel context.CancelCauseFunc

	readMu sync.Mutex
	pre    string // what is left of the preface, which the scanner took
	left   int    // bytes of the current frame that are still to come

	writeMu sync.Mutex
	out     outTracker
}

func newSession(l *Link) *session {
	s := &session{link: l, pre: preface}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	return s
}

// lose ends the session and tells its requests why they are over.
func (s *session) lose() { s.cancel(wire.ErrSessionLost) }

// Read follows the frames as it goes.
func (s *session) Read(p []byte) (int, error) {
	s.readMu.Lock()
	defer s.readMu.Unlock()
	if s.ctx.Err() != nil {
		return 0, net.ErrClosed
	}
	if len(s.pre) > 0 {
		n := copy(p, s.pre)
		s.pre = s.pre[n:]
		return n, nil
	}
	n, err := s.read(p)
	if err != nil {
		s.lose()
	}
	return n, err
}

func (s *session) read(p []byte) (int, error) {
	l := s.link
	if s.left == 0 {
		if err := s.nextFrame(); err != nil {
			return 0, err
		}
	}
	p = p[:min(len(p), s.left)]
	if l.r == l.w {
		// A large piece goes straight to where it belongs.
		if len(p) >= bufSize/8 {
			n, err := l.stream.Read(p)
			s.left -= n
			return n, err
		}
		if err := l.fill(l.stream.Read); err != nil {
			return 0, err
		}
	}
	n := copy(p, l.buf[l.r:l.w])
	l.r += n
	s.left -= n
	return n, nil
}

// nextFrame waits for a whole frame header and leaves it in the buffer. A
// length over the limit can't come from a well-behaved peer. It is left to
// the scanner: every byte of a synchronisation line is above the highest first
// byte that a header may have.
func (s *session) nextFrame() error {
	l := s.link
	for l.w-l.r < frameHeader {
		if err := l.fill(l.stream.Read); err != nil {
			return err
		}
	}
	n := frameLength(l.buf[l.r:])
	if n > MaxFrame {
		return errDesync
	}
	s.left = frameHeader + n
	return nil
}

func (s *session) Write(p []byte) (int, error) {
	s.writeMu.Lock()
	defer s.writeMu.Unlock()
	if s.ctx.Err() != nil {
		return 0, net.ErrClosed
	}
	n, err := s.link.stream.Write(p)
	// After such a GOAWAY the HTTP/2 layer lingers for a while, deaf.
	if err != nil || s.out.feed(p[:n]) {
		s.lose()
	}
	return n, err
}

// Close ends the session; the link goes on.
func (s *session) Close() error {
	s.lose()
	return nil
}

// release takes the stream back: it waits until nobody reads or writes on
// behalf of this session any more.
func (s *session) release() {
	st := s.link.stream
	past := time.Unix(1, 0)
	_ = st.SetReadDeadline(past)
	_ = st.SetWriteDeadline(past)
	s.readMu.Lock()
	s.writeMu.Lock()
	_ = st.SetReadDeadline(time.Time{})
	_ = st.SetWriteDeadline(time.Time{})
	s.writeMu.Unlock()
	s.readMu.Unlock()
}

// The HTTP server sets deadlines only to clear them.

func (s *session) SetDeadline(time.Time) error      { return nil }
func (s *session) SetReadDeadline(time.Time) error  { return nil }
func (s *session) SetWriteDeadline(time.Time) error { return nil }
func (s *session) LocalAddr() net.Addr              { return addr{} }
func (s *session) RemoteAddr() net.Addr             { return addr{} }

type addr struct{}

func (addr) Network() string { return "agent" }
func (addr) String() string  { return "agent" }

// quiet drops what the HTTP server has to say: a session that breaks is an
// everyday event here.
func quiet() *log.Logger { return log.New(io.Discard, "", 0) }
