package tunnel

import (
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	const table = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0000000000000000 100 0 0 10 0
   1: 0100007F:1F90 0100007F:D431 01 00000000:00000000 00:00000000 00000000     0        0 4712 1
   2: 00000000000000000000000001000000:0050 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4713 1
   3: nonsense 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4714 1
   4: 0100007F:1F90 00000000:0000 0A
`
	got := parse(strings.NewReader(table))
	if len(got) != 2 || got[0] != (Port{Port: 8080, Address: "127.0.0.1", inode: "4711"}) ||
		got[1] != (Port{Port: 80, Address: "::1", inode: "4713"}) {
		t.Errorf("got %+v", got)
	}
}

func FuzzParseAddress(f *testing.F) {
	f.Add("0100007F:1F90")
	f.Add("00000000000000000000000001000000:0050")
	f.Add(":")
	f.Fuzz(func(t *testing.T, s string) {
		if a, ok := parseAddress(s); ok && !a.Addr().IsValid() {
			t.Errorf("%q gives %v", s, a)
		}
	})
}
