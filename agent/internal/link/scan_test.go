package link

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
)

type syncVector struct {
	Name    string  `json:"name"`
	Hex     string  `json:"hex"`
	Bad     bool    `json:"bad"`
	Nonce   string  `json:"nonce"`
	N       int     `json:"n"`
	Gen     int     `json:"gen"`
	Lines   [][]any `json:"lines"`
	Preface bool    `json:"preface"`
	Rest    string  `json:"rest"`
}

// scanned is what a scanner finds in an input.
type scanned struct {
	lines   []string
	preface bool
	rest    string
}

// scan feeds pieces of the given size.
func scan(data []byte, size int) scanned {
	var out scanned
	var sc Scanner
	for len(data) > 0 {
		n, ev, text := sc.Feed(data[:min(size, len(data))])
		data = data[n:]
		switch ev {
		case Sync:
			out.lines = append(out.lines, text)
		case Preface:
			out.preface, out.rest = true, string(data)
			return out
		}
	}
	return out
}

func TestSyncVectors(t *testing.T) {
	b, err := os.ReadFile("../../../contracts/agent/sync.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors []syncVector
	if err := json.Unmarshal(b, &vectors); err != nil {
		t.Fatal(err)
	}
	for _, v := range vectors {
		t.Run(v.Name, func(t *testing.T) { checkSync(t, &v) })
	}
}

func checkSync(t *testing.T, v *syncVector) {
	data, err := hex.DecodeString(v.Hex)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(data), "SYNC-OK") {
		if !v.Bad && !strings.HasSuffix(string(data), string(echo(fmt.Sprint(v.Nonce, " ", v.N)))) {
			t.Errorf("our echo would be %q", echo(fmt.Sprint(v.Nonce, " ", v.N)))
		}
		if got := scan(data, len(data)); got.lines != nil {
			t.Errorf("an echo was taken for a line: %v", got.lines)
		}
		return
	}
	var want scanned
	switch {
	case v.Lines != nil:
		for _, l := range v.Lines {
			want.lines = append(want.lines, fmt.Sprint(l[0], " ", l[1]))
		}
		rest, _ := hex.DecodeString(v.Rest)
		want.preface, want.rest = v.Preface, string(rest)
	case !v.Bad:
		want.lines = []string{fmt.Sprint(v.Nonce, " ", v.N)}
	}
	for _, size := range []int{1, 2, 7, len(data)} {
		if got := scan(data, size); !reflect.DeepEqual(got, want) {
			t.Errorf("in pieces of %d: got %+v, want %+v", size, got, want)
		}
	}
}

func FuzzScanner(f *testing.F) {
	line := "\nCLOCHE-SYNC 0123456789abcdef0123456789abcdef 0\n"
	f.Add([]byte(line+preface+"rest"), 3)
	f.Add([]byte(preface+line), 1)
	f.Add([]byte(line+"PRI * HTTP"+preface), 5)
	f.Add([]byte("\nCLOCHE-SYNC x\n"+line), 2)
	f.Fuzz(func(t *testing.T, data []byte, size int) {
		if size < 1 {
			return
		}
		whole, pieces := scan(data, len(data)), scan(data, size)
		if !reflect.DeepEqual(whole, pieces) {
			t.Fatalf("whole %+v, in pieces of %d %+v", whole, size, pieces)
		}
		for _, l := range whole.lines {
			if !strings.Contains(string(data), "\nCLOCHE-SYNC "+l+"\n") {
				t.Fatalf("invented line %q", l)
			}
		}
		if whole.preface && (len(whole.lines) == 0 || !strings.HasSuffix(string(data), preface+whole.rest)) {
			t.Fatalf("invented preface: %+v", whole)
		}
	})
}

func TestOutTracker(t *testing.T) {
	goAway := func(code byte) string {
		return "\x00\x00\x0a\x07\x00\x00\x00\x00\x00" + "\x00\x00\x00\x05" + "\x00\x00\x00" + string(code) + "xx"
	}
	data := "\x00\x00\x03\x00\x00\x00\x00\x00\x01abc" + "\x00\x00\x00\x04\x01\x00\x00\x00\x00"
	tests := []struct {
		out  string
		want bool
	}{
		{data + data, false},
		{data + goAway(0) + data, false},
		{data + goAway(6), true},
		{goAway(0) + data + goAway(1), true},
		{"\x00\x00\x11\x00\x00\x00\x00\x00\x01" + goAway(1)[:17], false},
	}
	for _, tt := range tests {
		for size := 1; size <= len(tt.out); size++ {
			var tr outTracker
			got := false
			for rest := tt.out; len(rest) > 0; {
				k := min(size, len(rest))
				got = tr.feed([]byte(rest[:k]))
				rest = rest[k:]
			}
			if got != tt.want {
				t.Errorf("%q in pieces of %d: %v", tt.out, size, got)
			}
		}
	}
}
