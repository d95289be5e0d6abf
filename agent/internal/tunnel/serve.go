package tunnel

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net/http"
	"sync"

	"cloche.dev/agent/internal/wire"
)

const (
	header = 4
	// MaxPayload is the longest payload of a frame: with both heads it goes into
	// one write to the port.
	MaxPayload = wire.PortWrite - wire.FrameHead - header
	upBuffer   = 16 << 10
)

var (
	down = sync.Pool{New: func() any { return new([header + MaxPayload]byte) }}
	up   = sync.Pool{New: func() any { return new([upBuffer]byte) }}
)

// Serve joins the body of a request and its answer to a connection, until
// both directions have ended or one has failed. It closes the connection.
//
// The answer is a sequence of frames, a length and so many bytes; a length of
// zero says that the server will send no more. The end of the answer alone
// could not say that, because it ends the request as well.
func Serve(ctx context.Context, w http.ResponseWriter, body io.Reader, conn Conn) error {
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { abort(conn) })
	defer stop()
	h := w.Header()
	h["Content-Type"] = []string{"application/vnd.cloche.tunnel"}
	h["Date"] = nil
	flush := http.NewResponseController(w).Flush
	w.WriteHeader(http.StatusOK)
	if err := flush(); err != nil {
		return err
	}
	sent := make(chan error, 1)
	go func() { sent <- send(conn, body) }()
	if err := receive(w, flush, conn); err != nil {
		abort(conn)
		return err // the other direction ends with the request
	}
	return <-sent
}

// send copies what the host sends, and passes its end on.
func send(conn Conn, body io.Reader) error {
	buf := up.Get().(*[upBuffer]byte)
	defer up.Put(buf)
	for {
		n, err := body.Read(buf[:])
		if n > 0 {
			if _, werr := conn.Write(buf[:n]); werr != nil {
				abort(conn)
				return werr
			}
		}
		if errors.Is(err, io.EOF) {
			return conn.CloseWrite()
		}
		if err != nil {
			abort(conn)
			return err
		}
	}
}

// receive copies what the server sends, frame by frame.
func receive(w io.Writer, flush func() error, conn Conn) error {
	buf := down.Get().(*[header + MaxPayload]byte)
	defer down.Put(buf)
	for {
		n, err := conn.Read(buf[header:])
		if n > 0 || errors.Is(err, io.EOF) {
			binary.BigEndian.PutUint32(buf[:header], uint32(n))
			if _, werr := w.Write(buf[:header+n]); werr != nil {
				return werr
			}
			if werr := flush(); werr != nil {
				return werr
			}
		}
		if n > 0 && err == nil {
			continue
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		return err
	}
}

// abort ends a connection so that the server sees that it is not whole.
func abort(conn Conn) {
	resets(conn)
	_ = conn.Close()
}
