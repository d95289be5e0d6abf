package link

import "cloche.dev/agent/internal/wire"

const (
	// MaxFrame is the largest HTTP/2 frame that the agent announces.
	MaxFrame    = 64 << 10
	frameHeader = wire.FrameHead
	typeGoAway  = 0x7
)

// outTracker follows the frames that the HTTP/2 server writes, in pieces of
// any size, to notice the one that says that the session has failed.
type outTracker struct {
	head  [frameHeader + 8]byte // frame header, and the start of a GOAWAY
	n     int                   // bytes of head in use
	skip  int                   // payload bytes that need no look
	fatal bool
}

// feed reports whether a GOAWAY with an error code has gone out completely up
// to that code.
func (t *outTracker) feed(b []byte) bool {
	for len(b) > 0 {
		if t.skip > 0 {
			k := min(t.skip, len(b))
			t.skip -= k
			b = b[k:]
			continue
		}
		want := frameHeader
		if t.n >= frameHeader {
			want = len(t.head)
		}
		k := copy(t.head[t.n:want], b)
		t.n += k
		b = b[k:]
		if t.n == want {
			t.headDone()
		}
	}
	return t.fatal
}

func (t *outTracker) headDone() {
	length := frameLength(t.head[:])
	goAway := t.head[3] == typeGoAway && length >= 8
	switch {
	case t.n == len(t.head):
		code := t.head[frameHeader+4:]
		t.fatal = t.fatal || code[0]|code[1]|code[2]|code[3] != 0
		t.n, t.skip = 0, length-8
	case !goAway:
		t.n, t.skip = 0, length
	}
}

func frameLength(h []byte) int {
	return int(h[0])<<16 | int(h[1])<<8 | int(h[2])
}
