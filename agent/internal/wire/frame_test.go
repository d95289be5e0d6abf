package wire

import (
	"bytes"
	"errors"
	"testing"
)

func FuzzDecode(f *testing.F) {
	f.Add(AppendFrame(nil, TypeStdout, 7, []byte("hello")))
	f.Add(AppendFrame(nil, TypeHeartbeat, 1<<40, nil))
	f.Add([]byte{6})
	f.Add([]byte{1, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		fr, n, err := Decode(b)
		if err != nil {
			if n != 0 {
				t.Fatalf("an error took %d bytes", n)
			}
			return
		}
		if n < HeaderSize || n > len(b) || len(fr.Payload) > MaxPayload {
			t.Fatalf("took %d of %d bytes, payload %d", n, len(b), len(fr.Payload))
		}
		if again := AppendFrame(nil, fr.Type, fr.Offset, fr.Payload); !bytes.Equal(again, b[:n]) {
			t.Fatalf("%x became %x", b[:n], again)
		}
	})
}

func TestDecodeNeedsEveryByte(t *testing.T) {
	b := AppendFrame(nil, TypeStderr, 3, []byte("abc"))
	for i := range b {
		if _, _, err := Decode(b[:i]); !errors.Is(err, ErrShort) {
			t.Errorf("%d bytes: %v", i, err)
		}
	}
}
