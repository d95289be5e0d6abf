package proc

import (
	"bytes"
	"context"
	"fmt"
	"math/rand"
	"net/http/httptest"
	"strings"
	"testing"

	"cloche.dev/agent/internal/testhost"
	"cloche.dev/agent/internal/wire"
)

func framed(s string) []byte { return append(make([]byte, wire.HeaderSize), s...) }

func TestRingKeepsTheTail(t *testing.T) {
	rng := rand.New(rand.NewSource(1))
	for limit := range 20 {
		r := ring{limit: limit}
		var all []byte
		lost := 0
		for range 50 {
			b := make([]byte, rng.Intn(2*limit+3))
			rng.Read(b)
			all = append(all, b...)
			lost += r.add(b)
			p := r.parts()
			kept := append(append([]byte{}, p[0]...), p[1]...)
			if want := all[len(all)-min(limit, len(all)):]; !bytes.Equal(kept, want) {
				t.Fatalf("limit %d: kept %x, want %x", limit, kept, want)
			}
			if lost != len(all)-len(kept) {
				t.Fatalf("limit %d: lost %d of %d, kept %d", limit, lost, len(all), len(kept))
			}
		}
	}
}

// collect runs fn against a frame writer and reads what comes out.
func collect(t *testing.T, fn func(*frameWriter)) *testhost.Result {
	t.Helper()
	rec := httptest.NewRecorder()
	w := newFrameWriter(rec)
	if err := w.started(wire.Started{PID: 1}); err != nil {
		t.Fatal(err)
	}
	fn(w)
	w.close()
	res, err := testhost.Collect(rec.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res
}

func TestLimitKeepsHeadAndTail(t *testing.T) {
	for _, total := range []int{0, 1, 5, 9, 10, 11, 100, 200_000} {
		var all strings.Builder
		res := collect(t, func(w *frameWriter) {
			l := &limited{next: w}
			l.lim[1], l.lim[2] = newLimiter(10, nil), newLimiter(10, nil)
			for all.Len() < total {
				piece := fmt.Sprint(all.Len() % 7)
				all.WriteString(piece)
				_ = l.write(1, framed(piece))
			}
			l.finish()
			_ = w.exit(wire.Exit{StdoutDropped: l.lim[1].dropped})
		})
		s := all.String()
		if total <= 10 {
			if string(res.Stdout) != s || len(res.Gaps) != 0 {
				t.Errorf("%d: got %q and gaps %v", total, res.Stdout, res.Gaps)
			}
			continue
		}
		if want := s[:5] + s[len(s)-5:]; string(res.Stdout) != want {
			t.Errorf("%d: got %q, want %q", total, res.Stdout, want)
		}
		if len(res.Gaps) != 1 || res.Gaps[0].Bytes != int64(total-10) || res.Exit.StdoutDropped != int64(total-10) {
			t.Errorf("%d: gaps %v, dropped %d", total, res.Gaps, res.Exit.StdoutDropped)
		}
	}
}

func TestLimitKills(t *testing.T) {
	killed := 0
	l := newLimiter(4, func() { killed++ })
	for i, want := range []int{3, 1, 0} {
		if got := l.pass([]byte("abc")); got != want {
			t.Errorf("write %d: %d passed", i, got)
		}
	}
	if killed == 0 || l.dropped != 5 {
		t.Errorf("killed %d, dropped %d", killed, l.dropped)
	}
}

func follow(t *testing.T, r *record, from uint64) *testhost.Result {
	t.Helper()
	rec := httptest.NewRecorder()
	w := newFrameWriter(rec)
	f := follower{rec: r, out: w, pos: from}
	if err := f.follow(context.Background()); err != nil {
		t.Fatal(err)
	}
	w.close()
	res, err := testhost.Collect(rec.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res
}

func TestRecordReplays(t *testing.T) {
	r := newRecord()
	r.begin(wire.Started{PID: 7})
	_ = r.write(1, framed("one"))
	_ = r.write(1, framed("two"))
	_ = r.write(2, framed("err"))
	_ = r.gap(1, 100)
	_ = r.write(1, framed("end"))
	_ = r.exit(wire.Exit{ExitCode: 5})
	tests := []struct {
		from        uint64
		out, errOut string
		gap         int64
	}{
		{0, "onetwoend", "err", 100},
		{2, "etwoend", "err", 100},
		{7, "end", "rr", 100},
		{50, "end", "", 59},
		{110, "nd", "", 0},
		{112, "", "", 0},
	}
	for _, tt := range tests {
		res := follow(t, r, tt.from)
		gap := int64(0)
		for _, g := range res.Gaps {
			gap += g.Bytes
		}
		if string(res.Stdout) != tt.out || string(res.Stderr) != tt.errOut || gap != tt.gap || res.Exit.ExitCode != 5 {
			t.Errorf("from %d: %q %q gap %d", tt.from, res.Stdout, res.Stderr, gap)
		}
	}
}

func TestSmallRecordKeepsTheNewest(t *testing.T) {
	for _, size := range []int{1, 7, 300, 3000, 20_000} {
		r := newRecord()
		r.limit = 4096
		total := 0
		for total < 50_000 {
			_ = r.write(1, framed(strings.Repeat("x", size)))
			total += size
			if kept := total - int(r.first); r.cost > r.limit || kept < min(total, r.limit/2) {
				t.Fatalf("writes of %d: after %d bytes %d are kept, at a cost of %d", size, total, kept, r.cost)
			}
		}
	}
}

func TestRecordForgetsTheOldest(t *testing.T) {
	r := newRecord()
	r.begin(wire.Started{})
	var all bytes.Buffer
	for i := range 3000 {
		line := fmt.Sprintf("%01000d\n", i)
		all.WriteString(line)
		_ = r.write(1, framed(line))
	}
	_ = r.exit(wire.Exit{})
	res := follow(t, r, 0)
	if len(res.Gaps) != 1 || res.Gaps[0].Stream != 0 || int(res.Gaps[0].Bytes)+len(res.Stdout) != all.Len() {
		t.Fatalf("gaps %v, %d bytes of %d", res.Gaps, len(res.Stdout), all.Len())
	}
	if len(res.Stdout) < recordLimit/2 || !bytes.HasSuffix(all.Bytes(), res.Stdout) {
		t.Errorf("kept %d bytes", len(res.Stdout))
	}
	// One byte to each stream in turn must not cost many times the limit.
	for range recordLimit / 2 {
		_ = r.write(1, framed("a"))
		_ = r.write(2, framed("b"))
	}
	if n := len(r.segments); n > recordLimit/segmentCost || r.cost > recordLimit {
		t.Errorf("%d segments cost %d", n, r.cost)
	}
}

// TestFollowersAtTheirOwnPace starts readers while a writer writes.
func TestFollowersAtTheirOwnPace(t *testing.T) {
	r := newRecord()
	results := make(chan *testhost.Result, 4)
	for range 4 {
		go func() { results <- follow(t, r, 0) }()
	}
	r.begin(wire.Started{})
	want := ""
	for i := range 2000 {
		line := fmt.Sprintln(i)
		want += line
		_ = r.write(1, framed(line))
	}
	_ = r.exit(wire.Exit{})
	for range 4 {
		if res := <-results; string(res.Stdout) != want {
			t.Errorf("got %d of %d bytes", len(res.Stdout), len(want))
		}
	}
}

func TestParseStat(t *testing.T) {
	s, ok := parseStat([]byte("12 (a) b (c)) S 3 4 5 6 7"))
	if !ok || s.parent != 3 || s.session != 5 {
		t.Errorf("got %+v %v", s, ok)
	}
	for _, bad := range []string{"", "12 (x", "12 (x) Z 1 2 3", "12 (x) S 1"} {
		if _, ok := parseStat([]byte(bad)); ok {
			t.Errorf("accepted %q", bad)
		}
	}
}
