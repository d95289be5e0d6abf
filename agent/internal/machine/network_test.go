package machine

import "testing"

func TestNetworkIsCheckedBeforeAnythingIsDone(t *testing.T) {
	good := Network{"192.0.2.2/30", "192.0.2.1", "fd00::2/126", "fd00::1", "192.0.2.1"}
	if err := (&Renew{Network: &good}).Check(); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Network){
		"no prefix":            func(n *Network) { n.IP4 = "192.0.2.2" },
		"not an address":       func(n *Network) { n.IP6 = "x/64" },
		"gateway elsewhere":    func(n *Network) { n.Gateway4 = "192.0.2.9" },
		"gateway of the other": func(n *Network) { n.Gateway6 = "192.0.2.1" },
		"families swapped":     func(n *Network) { n.IP4, n.Gateway4 = n.IP6, n.Gateway6 },
		"no resolver":          func(n *Network) { n.Resolver = "dns\nnameserver 1.2.3.4" },
	} {
		bad := good
		change(&bad)
		if (&Renew{Network: &bad}).Check() == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}
