package testhost

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"os"
	"testing"

	"cloche.dev/agent/internal/wire"
)

type frameVector struct {
	Name   string `json:"name"`
	Hex    string `json:"hex"`
	Bad    bool   `json:"bad"`
	Frames []struct {
		Type    byte    `json:"type"`
		Offset  uint64  `json:"offset"`
		Payload *string `json:"payload"`
		Length  int     `json:"length"`
	} `json:"frames"`
}

func TestFrameVectors(t *testing.T) {
	b, err := os.ReadFile("../../../contracts/agent/frames.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors []frameVector
	if err := json.Unmarshal(b, &vectors); err != nil {
		t.Fatal(err)
	}
	for _, v := range vectors {
		t.Run(v.Name, func(t *testing.T) { checkFrames(t, &v) })
	}
}

func checkFrames(t *testing.T, v *frameVector) {
	data, err := hex.DecodeString(v.Hex)
	if err != nil {
		t.Fatal(err)
	}
	_, err = Collect(bytes.NewReader(data))
	if v.Bad {
		if err == nil {
			t.Error("accepted")
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range v.Frames {
		f, n, err := wire.Decode(data)
		if err != nil {
			t.Fatal(err)
		}
		if f.Type != want.Type || f.Offset != want.Offset {
			t.Errorf("frame %d: type %d, offset %d", i, f.Type, f.Offset)
		}
		if want.Payload == nil && len(f.Payload) != want.Length ||
			want.Payload != nil && hex.EncodeToString(f.Payload) != *want.Payload {
			t.Errorf("frame %d: payload %x", i, f.Payload)
		}
		if again := wire.AppendFrame(nil, f.Type, f.Offset, f.Payload); !bytes.Equal(again, data[:n]) {
			t.Errorf("frame %d is encoded differently", i)
		}
		data = data[n:]
	}
	if len(data) > 0 {
		t.Errorf("%d bytes left", len(data))
	}
}
