package machine

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"unsafe"

	"cloche.dev/agent/internal/sys"
	"cloche.dev/agent/internal/wire"
)

const (
	card       = "eth0"
	resolvConf = "/etc/resolv.conf"
)

// Network is what the only network card of the machine gets: prefixes such as
// 192.0.2.2/30, and the gateways, which are on the link. The resolver is used
// if the image names none.
type Network struct {
	IP4      string `json:"ip4"`
	Gateway4 string `json:"gateway4"`
	IP6      string `json:"ip6"`
	Gateway6 string `json:"gateway6"`
	Resolver string `json:"resolver"`
}

type address struct {
	prefix  netip.Prefix
	gateway netip.Addr
}

func (n *Network) parse() (v4, v6 address, err error) {
	if v4, err = parseAddress("network.ip4", n.IP4, n.Gateway4); err != nil {
		return v4, v6, err
	}
	if v6, err = parseAddress("network.ip6", n.IP6, n.Gateway6); err != nil {
		return v4, v6, err
	}
	if !v4.prefix.Addr().Is4() || !v6.prefix.Addr().Is6() {
		return v4, v6, wire.BadRequest("network", "ip4 or ip6 is of the other family")
	}
	if _, err := netip.ParseAddr(n.Resolver); err != nil {
		return v4, v6, wire.BadRequest("network.resolver", "want an address")
	}
	return v4, v6, nil
}

func parseAddress(field, prefix, gateway string) (address, error) {
	p, err := netip.ParsePrefix(prefix)
	if err != nil {
		return address{}, wire.BadRequest(field, "want an address and the length of its prefix")
	}
	g, err := netip.ParseAddr(gateway)
	if err != nil || g.BitLen() != p.Addr().BitLen() || !p.Contains(g) {
		return address{}, wire.BadRequest(field, "the gateway is not an address of the prefix")
	}
	return address{p, g}, nil
}

// setNetwork gives the card its addresses, or finds that it has them, and ends
// every connection with another machine: after a restore nobody is at their
// other end. A machine without a card has nothing to set.
func setNetwork(n *Network) error {
	v4, v6, err := n.parse()
	if err != nil {
		return err
	}
	c, err := openCard()
	if errors.Is(err, syscall.ENODEV) {
		return nil
	}
	if err != nil {
		return err
	}
	defer c.close()
	if !c.has(v4.prefix.Addr()) {
		if err := c.configure(v4, v6); err != nil {
			return err
		}
	}
	setResolver(n.Resolver)
	// A kernel that cannot tell its connections leaves them to their own timeouts.
	if _, err = sys.CutTCP(); err == syscall.ENOENT {
		return nil
	}
	return err
}

func setResolver(server string) {
	if !strings.Contains(contentOf(resolvConf), "nameserver") {
		_ = setContent(resolvConf, "nameserver "+server+"\n")
	}
}

// netCard changes the card by ioctl(2).
type netCard struct {
	fd4, fd6 int
	index    int32
}

type ifreq struct {
	name [syscall.IFNAMSIZ]byte
	data [24]byte
}

func newRequest() ifreq {
	var r ifreq
	copy(r.name[:], card)
	return r
}

func openCard() (*netCard, error) {
	fd4, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	c := &netCard{fd4: fd4, fd6: -1}
	if c.fd6, err = syscall.Socket(syscall.AF_INET6, syscall.SOCK_DGRAM|syscall.SOCK_CLOEXEC, 0); err != nil {
		c.fd6 = -1 // a kernel without IPv6
	}
	r := newRequest()
	if err := sys.Ioctl(fd4, syscall.SIOCGIFINDEX, unsafe.Pointer(&r)); err != nil {
		c.close()
		return nil, err
	}
	c.index = *(*int32)(unsafe.Pointer(&r.data[0]))
	return c, nil
}

func (c *netCard) close() {
	_ = syscall.Close(c.fd4)
	if c.fd6 >= 0 {
		_ = syscall.Close(c.fd6)
	}
}

func (c *netCard) has(a netip.Addr) bool {
	r := newRequest()
	if sys.Ioctl(c.fd4, syscall.SIOCGIFADDR, unsafe.Pointer(&r)) != nil {
		return false
	}
	return netip.AddrFrom4([4]byte(r.data[4:8])) == a
}

func (c *netCard) configure(v4, v6 address) error {
	// Its own addresses are all it has; nobody else is on the link to ask.
	for _, name := range []string{"accept_dad", "accept_ra", "autoconf"} {
		_ = os.WriteFile("/proc/sys/net/ipv6/conf/"+card+"/"+name, []byte("0"), 0)
	}
	mask := netip.AddrFrom4([4]byte{255, 255, 255, 255})
	if p, err := mask.Prefix(v4.prefix.Bits()); err == nil {
		mask = p.Addr()
	}
	steps := []struct {
		what    string
		request uintptr
		data    []byte
	}{
		{"set the address", syscall.SIOCSIFADDR, sockaddr4(v4.prefix.Addr())},
		{"set the netmask", syscall.SIOCSIFNETMASK, sockaddr4(mask)},
		{"set the card up", syscall.SIOCSIFFLAGS, []byte{syscall.IFF_UP | syscall.IFF_RUNNING, 0}},
	}
	for _, s := range steps {
		r := newRequest()
		copy(r.data[:], s.data)
		if err := sys.Ioctl(c.fd4, s.request, unsafe.Pointer(&r)); err != nil {
			return fmt.Errorf("%s of %s: %w", s.what, card, err)
		}
	}
	if err := c.route4(v4.gateway); err != nil {
		return err
	}
	if c.fd6 < 0 {
		return nil
	}
	return c.configure6(v6)
}

func sockaddr4(a netip.Addr) []byte {
	b := make([]byte, 16)
	b[0] = syscall.AF_INET
	ip := a.As4()
	copy(b[4:], ip[:])
	return b
}

// rtentry is struct rtentry of the kernel.
type rtentry struct {
	_       uint64
	dst     [16]byte
	gateway [16]byte
	mask    [16]byte
	flags   uint16
	_       int16
	_       uint64
	_       uintptr
	metric  int16
	dev     uintptr
	_       [3]uint64
}

func (c *netCard) route4(gateway netip.Addr) error {
	const up, viaGateway = 1, 2
	r := rtentry{flags: up | viaGateway}
	any4 := netip.AddrFrom4([4]byte{})
	copy(r.dst[:], sockaddr4(any4))
	copy(r.mask[:], sockaddr4(any4))
	copy(r.gateway[:], sockaddr4(gateway))
	if err := sys.Ioctl(c.fd4, syscall.SIOCADDRT, unsafe.Pointer(&r)); err != nil && err != syscall.EEXIST {
		return fmt.Errorf("set the route: %w", err)
	}
	return nil
}

func (c *netCard) configure6(v6 address) error {
	set := struct {
		addr   [16]byte
		prefix uint32
		index  int32
	}{v6.prefix.Addr().As16(), uint32(v6.prefix.Bits()), c.index}
	err := sys.Ioctl(c.fd6, syscall.SIOCSIFADDR, unsafe.Pointer(&set))
	if err != nil && err != syscall.EEXIST {
		return fmt.Errorf("set the IPv6 address of %s: %w", card, err)
	}
	const up, viaGateway = 1, 2
	route := struct {
		dst, src, gateway [16]byte
		kind              uint32
		dstLen, srcLen    uint16
		metric            uint32
		info              uint64
		flags             uint32
		index             int32
	}{gateway: v6.gateway.As16(), metric: 1, flags: up | viaGateway, index: c.index}
	err = sys.Ioctl(c.fd6, syscall.SIOCADDRT, unsafe.Pointer(&route))
	if err != nil && err != syscall.EEXIST {
		return fmt.Errorf("set the IPv6 route: %w", err)
	}
	return nil
}
