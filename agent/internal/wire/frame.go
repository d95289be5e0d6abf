// Package wire holds the formats that the agent and the server share: the
// frames of an exec stream and the body of an error.
package wire

import (
	"encoding/binary"
	"errors"
)

// Frame types of an exec stream.
const (
	TypeStarted   = 0
	TypeStdout    = 1
	TypeStderr    = 2
	TypeGap       = 3
	TypeExit      = 4
	TypeHeartbeat = 5
)

const (
	// HeaderSize is the length of a frame's fixed part.
	HeaderSize = 13
	// MaxPayload is the most that one frame carries.
	MaxPayload = 64 << 10
	// FrameHead is the length of the fixed part of a frame of HTTP/2.
	FrameHead = 9
	// PortWrite is what the driver of the port takes at once.
	PortWrite = 32 << 10
	// FullFrame is as much as goes into one frame of HTTP/2, and with its head
	// into two whole writes to the port. A few bytes more would be one more of
	// each, and cost as much as those.
	FullFrame = 2*PortWrite - FrameHead
	// FullPayload is as much as goes there in one of ours.
	FullPayload = FullFrame - HeaderSize
)

// ContentType is the media type of a sequence of frames.
const ContentType = "application/vnd.cloche.frames"

// Frame is one decoded frame.
type Frame struct {
	Type    byte
	Offset  uint64
	Payload []byte
}

// What a decoder may find wrong with a frame. ErrShort means that more bytes
// are needed; the others are final.
var (
	ErrShort     = errors.New("frame is not complete")
	ErrType      = errors.New("unknown frame type")
	ErrLength    = errors.New("frame payload is too long")
	ErrHeartbeat = errors.New("heartbeat with a payload")
)

// PutHeader writes a frame header into the first HeaderSize bytes of b.
func PutHeader(b []byte, typ byte, offset uint64, length int) {
	b[0] = typ
	binary.BigEndian.PutUint64(b[1:9], offset)
	binary.BigEndian.PutUint32(b[9:13], uint32(length))
}

// AppendFrame appends the encoded frame to dst. The payload must not be
// longer than MaxPayload.
func AppendFrame(dst []byte, typ byte, offset uint64, payload []byte) []byte {
	var h [HeaderSize]byte
	PutHeader(h[:], typ, offset, len(payload))
	dst = append(dst, h[:]...)
	return append(dst, payload...)
}

// Decode reads one frame from the start of b and says how many bytes it took.
// The payload is a part of b.
func Decode(b []byte) (Frame, int, error) {
	if len(b) == 0 {
		return Frame{}, 0, ErrShort
	}
	if b[0] > TypeHeartbeat {
		return Frame{}, 0, ErrType
	}
	if len(b) < HeaderSize {
		return Frame{}, 0, ErrShort
	}
	length := binary.BigEndian.Uint32(b[9:13])
	if length > MaxPayload {
		return Frame{}, 0, ErrLength
	}
	if b[0] == TypeHeartbeat && length != 0 {
		return Frame{}, 0, ErrHeartbeat
	}
	end := HeaderSize + int(length)
	if len(b) < end {
		return Frame{}, 0, ErrShort
	}
	f := Frame{Type: b[0], Offset: binary.BigEndian.Uint64(b[1:9]), Payload: b[HeaderSize:end]}
	return f, end, nil
}
