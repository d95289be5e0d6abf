package link

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"time"
)

// Stream is the byte pipe below a link.
type Stream interface {
	io.Writer
	// Read gives io.EOF when the other side has hung up.
	Read(p []byte) (int, error)
	// ReadWait is Read, but sleeps through a time without a host, if the
	// stream can have such a time and still come back.
	ReadWait(p []byte) (int, error)
	SetReadDeadline(t time.Time) error
	SetWriteDeadline(t time.Time) error
}

// bufSize is what a link reads ahead. A virtio port hands out a page at most
// per read; a socket more.
const bufSize = 32 << 10

// Server runs HTTP/2 sessions for any number of links.
type Server struct {
	http     http.Server
	sessions chan net.Conn
	closed   chan struct{}
}

// NewServer prepares a server that answers with h. Its Serve must run.
func NewServer(h http.Handler) *Server {
	s := &Server{sessions: make(chan net.Conn), closed: make(chan struct{})}
	var p http.Protocols
	p.SetUnencryptedHTTP2(true)
	s.http = http.Server{
		Handler:   h,
		Protocols: &p,
		ErrorLog:  quiet(),
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams:      1024,
			MaxReadFrameSize:          MaxFrame,
			MaxReceiveBufferPerStream: 1 << 20,
			// More than all streams together may hold unread: uploads that stand
			// still must never stop the calls beside them.
			MaxReceiveBufferPerConnection: 64 << 20,
		},
		ConnContext: func(_ context.Context, c net.Conn) context.Context {
			return c.(*session).ctx
		},
	}
	return s
}

// Serve hands sessions to the HTTP server until Close.
func (s *Server) Serve() error { return s.http.Serve(s) }

// Accept, Close and Addr make the server its own listener.
func (s *Server) Accept() (net.Conn, error) {
	select {
	case c := <-s.sessions:
		return c, nil
	case <-s.closed:
		return nil, net.ErrClosed
	}
}

// Close ends Serve. Sessions that run are not touched.
func (s *Server) Close() error {
	select {
	case <-s.closed:
	default:
		close(s.closed)
	}
	return nil
}

// Addr is there because a listener has one.
func (s *Server) Addr() net.Addr { return addr{} }

// Link is one stream and the bytes read ahead from it.
type Link struct {
	stream Stream
	buf    [bufSize]byte
	r, w   int
}

// NewLink makes a link of a stream.
func NewLink(s Stream) *Link { return &Link{stream: s} }

// Run brings the link into step and serves sessions until the stream fails
// for good.
func (l *Link) Run(s *Server) error {
	for {
		if err := l.synchronise(); err != nil {
			return err
		}
		c := newSession(l)
		select {
		case s.sessions <- c:
		case <-s.closed:
			return net.ErrClosed
		}
		<-c.ctx.Done()
		c.release()
	}
}

// synchronise answers lines until the preface has been met.
func (l *Link) synchronise() error {
	var sc Scanner
	for {
		if l.r == l.w {
			if err := l.fill(l.stream.ReadWait); err != nil {
				return err
			}
		}
		n, ev, text := sc.Feed(l.buf[l.r:l.w])
		l.r += n
		switch ev {
		case Preface:
			return nil
		case Sync:
			if _, err := l.stream.Write(echo(text)); err != nil {
				return err
			}
		}
	}
}

// fill reads more bytes behind those that are buffered.
func (l *Link) fill(read func([]byte) (int, error)) error {
	if l.r > 0 {
		l.w = copy(l.buf[:], l.buf[l.r:l.w])
		l.r = 0
	}
	n, err := read(l.buf[l.w:])
	l.w += n
	if n > 0 {
		return nil
	}
	if err == nil {
		return io.ErrNoProgress
	}
	return err
}

var errDesync = errors.New("link: bytes that are no HTTP/2 frame")
