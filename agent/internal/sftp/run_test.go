package sftp

import (
	"bytes"
	"encoding/binary"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestWritesInAnyOrder sends what goes on where the last write has ended, and
// what does not, of two files in turn, with reads in between that must see all
// that came before them.
func TestWritesInAnyOrder(t *testing.T) {
	dir := t.TempDir()
	rnd := rand.New(rand.NewPCG(5, 6))
	packets := [][]byte{
		request(fxpInit, 3),
		request(fxpOpen, 0, "/a", openRead|openWrite|openCreate, none),
		request(fxpOpen, 0, "/b", openRead|openWrite|openCreate, none),
	}
	models := [2][]byte{}
	type look struct{ want string }
	looks := map[uint32]look{}
	at := [2]int{}
	for id := uint32(1); id < 900; id++ {
		which := 0
		if rnd.IntN(50) == 0 {
			which = 1
		}
		name := string(rune('1' + which))
		switch rnd.IntN(60) {
		case 0:
			at[which] = rnd.IntN(len(models[which]) + 5000)
		case 1:
			model := models[which]
			from := rnd.IntN(len(model) + 1)
			want := model[from:min(from+9000, len(model))]
			looks[id] = look{string(want)}
			packets = append(packets, request(fxpRead, id, name, uint64(from), 9000))
			continue
		}
		size := 32 << 10
		if rnd.IntN(20) == 0 {
			size = 1 + rnd.IntN(60000)
		}
		data := make([]byte, size)
		binary.LittleEndian.PutUint32(data[:min(size, 4):4], id)
		for i := range data {
			data[i] += byte(rnd.Uint32())
		}
		if grown := at[which] + size; grown > len(models[which]) {
			models[which] = append(models[which], make([]byte, grown-len(models[which]))...)
		}
		copy(models[which][at[which]:], data)
		packets = append(packets, request(fxpWrite, id, name, uint64(at[which]), string(data)))
		at[which] += size
	}
	all, err := serve(t, dir, false, packets...)
	if err != nil || len(all) != len(packets) {
		t.Fatalf("%d answers to %d requests: %v", len(all), len(packets), err)
	}
	for i, r := range all[3:] {
		if id := uint32(i + 1); r.id != id {
			t.Fatalf("answer %d is where %d has to be", r.id, id)
		}
		if l, ok := looks[r.id]; ok && l.want != "" && r.text() != l.want {
			t.Fatalf("read %d does not see what was written before it", r.id)
		} else if !ok && !strings.HasPrefix(r.status(), "0 ") {
			t.Fatalf("write %d: %s", r.id, r.status())
		}
	}
	for which, name := range []string{"a", "b"} {
		if got, _ := os.ReadFile(filepath.Join(dir, name)); !bytes.Equal(got, models[which]) {
			t.Errorf("%s is another file", name)
		}
	}
}

// TestEachFailureIsTold: none of the writes of a run that fails is said to be
// well.
func TestEachFailureIsTold(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "f"), []byte("abc"), 0o600); err != nil {
		t.Fatal(err)
	}
	got := statuses(t, dir,
		request(fxpInit, 3),
		request(fxpOpen, 1, "/f", openRead, none),
		request(fxpWrite, 2, "1", uint64(0), "x"),
		request(fxpWrite, 3, "1", uint64(1), "y"),
		request(fxpWrite, 4, "7", uint64(2), "z"),
		request(fxpWrite, 5, "1", uint64(1)<<63, "z"),
	)
	for i, status := range got[2:] {
		if strings.HasPrefix(status, "0 ") {
			t.Errorf("write %d: %s", i+2, status)
		}
	}
	if b, _ := os.ReadFile(filepath.Join(dir, "f")); string(b) != "abc" {
		t.Errorf("the file is %q", b)
	}
}

// TestNobodyWaitsForTheRest: a client that sends one write and waits is
// answered.
func TestNobodyWaitsForTheRest(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	ours, theirs := io.Pipe()
	answers, out := io.Pipe()
	go func() { _ = Serve(ours, out, false) }()
	read := make(chan []byte)
	go func() {
		b := make([]byte, 4096)
		for {
			n, err := answers.Read(b)
			if err != nil {
				return
			}
			read <- bytes.Clone(b[:n])
		}
	}()
	for i, packet := range [][]byte{
		request(fxpInit, 3),
		request(fxpOpen, 1, path, openWrite|openCreate, none),
		request(fxpWrite, 2, "1", uint64(0), "one"),
		request(fxpWrite, 3, "1", uint64(3), "two"),
	} {
		if _, err := theirs.Write(packet); err != nil {
			t.Fatal(err)
		}
		select {
		case <-read:
		case <-time.After(10 * time.Second):
			t.Fatalf("request %d is not answered", i)
		}
	}
	_ = theirs.Close()
	if b, _ := os.ReadFile(path); string(b) != "onetwo" {
		t.Errorf("the file is %q", b)
	}
	_ = answers.Close()
}

// TestLargeReads reads a file in pieces of many sizes, also past its end.
func TestLargeReads(t *testing.T) {
	dir := t.TempDir()
	rnd := rand.New(rand.NewPCG(8, 9))
	model := make([]byte, 3<<20+1234)
	for i := range model {
		model[i] = byte(rnd.Uint32())
	}
	path := filepath.Join(dir, "f")
	if err := os.WriteFile(path, model, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, opened := range []uint32{openRead, openRead | openWrite} {
		packets := [][]byte{request(fxpInit, 3), request(fxpOpen, 0, "/f", opened, none)}
		type look struct{ at, n int }
		looks := map[uint32]look{}
		for id := uint32(1); id < 60; id++ {
			l := look{int(id-1) * maxData, maxData}
			if rnd.IntN(3) == 0 {
				l = look{rnd.IntN(len(model) + 5000), 1 + rnd.IntN(maxPacket)}
			}
			looks[id] = l
			packets = append(packets, request(fxpRead, id, "1", uint64(l.at), uint32(l.n)))
		}
		all, err := serve(t, dir, false, packets...)
		if err != nil || len(all) != len(packets) {
			t.Fatalf("%d answers to %d requests: %v", len(all), len(packets), err)
		}
		for _, r := range all[2:] {
			l, want := looks[r.id], ""
			if l.at < len(model) {
				want = string(model[l.at:min(l.at+min(l.n, maxData), len(model))])
			}
			if want == "" {
				if !strings.HasPrefix(r.status(), "1 ") {
					t.Errorf("behind the end: %s", r.status())
				}
			} else if r.text() != want {
				t.Errorf("%d bytes at %d: %d bytes of something else", l.n, l.at, len(r.text()))
			}
		}
	}
}
