package machine

import (
	"strings"
	"testing"
)

func TestHostsWith(t *testing.T) {
	tests := []struct{ old, want string }{
		{"", "127.0.0.1\tlocalhost\n::1\tlocalhost\n127.0.1.1\tbox\n"},
		{"127.0.0.1 localhost", "127.0.0.1 localhost\n127.0.1.1\tbox\n"},
		{"127.0.1.1 old old.lan\n# x\n127.0.1.1 twice\n10.0.0.1 a\n", "127.0.1.1\tbox\n# x\n10.0.0.1 a\n"},
		{"  127.0.1.1\told\n", "127.0.1.1\tbox\n"},
	}
	for _, tt := range tests {
		if got := hostsWith(tt.old, "box"); got != tt.want {
			t.Errorf("%q: got %q", tt.old, got)
		}
	}
}

func TestRenewCheck(t *testing.T) {
	negative := int64(-1)
	good := &Renew{Entropy: make([]byte, 32), Hostname: "a-1", MachineID: strings.Repeat("a0", 16)}
	if err := good.Check(); err != nil {
		t.Error(err)
	}
	for name, r := range map[string]*Renew{
		"short entropy": {Entropy: make([]byte, 31)}, "long entropy": {Entropy: make([]byte, 513)},
		"no entropy": {Entropy: []byte{}}, "time": {TimeNS: &negative}, "upper case": {Hostname: "A"},
		"long name": {Hostname: strings.Repeat("a", 64)}, "blank": {Hostname: "a b"},
		"machine id": {MachineID: strings.Repeat("g", 32)}, "short id": {MachineID: "ab"},
	} {
		if r.Check() == nil {
			t.Errorf("%s was accepted", name)
		}
	}
}

func TestLimits(t *testing.T) {
	l := Limits()
	if total := MemTotal(); l.MemoryMax > total-24<<20 || l.MemoryMax < total/2 || l.PidsMax < 512 {
		t.Errorf("%+v of %d", l, total)
	}
}
