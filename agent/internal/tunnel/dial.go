// Package tunnel joins a call of the host to a TCP port of this machine, and
// tells which ports there are.
package tunnel

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"syscall"
	"time"

	"cloche.dev/agent/internal/wire"
)

const (
	// dialEach bounds one address: a rule of the machine's own that drops
	// packets must not keep the next one from being tried.
	dialEach = 3 * time.Second
	// dialAll bounds all of them.
	dialAll = 10 * time.Second
)

// Dial connects to a TCP port of this machine: 127.0.0.1, ::1, then the
// machine's other addresses. The error is an answer.
func Dial(ctx context.Context, port int) (*net.TCPConn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialAll)
	defer cancel()
	silent := false
	for _, address := range addresses() {
		conn, err := dialOne(ctx, netip.AddrPortFrom(address, uint16(port)))
		if err == nil {
			return conn, nil
		}
		if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.ENOMEM) {
			return nil, wire.FromErr(err, "port")
		}
		var late net.Error
		silent = silent || errors.As(err, &late) && late.Timeout()
		if ctx.Err() != nil {
			break
		}
	}
	if silent {
		return nil, &wire.Error{
			Status: http.StatusGatewayTimeout, Code: "timeout", Field: "port",
			Message: "a server listens on the port, perhaps, and takes no connection",
		}
	}
	return nil, wire.NotFound("port", "nothing listens on the port")
}

func dialOne(ctx context.Context, to netip.AddrPort) (*net.TCPConn, error) {
	d := net.Dialer{Timeout: dialEach, KeepAlive: -1}
	conn, err := d.DialContext(ctx, "tcp", to.String())
	if err != nil {
		return nil, err
	}
	tcp := conn.(*net.TCPConn)
	if tcp.LocalAddr().String() == tcp.RemoteAddr().String() {
		// The kernel has picked the very port that nobody listens on.
		_ = tcp.Close()
		return nil, syscall.ECONNREFUSED
	}
	return tcp, nil
}

// addresses are those a server of this machine may be bound to, in the order
// in which they are tried.
func addresses() []netip.Addr {
	found := []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}
	own, err := net.InterfaceAddrs()
	if err != nil {
		return found
	}
	for _, a := range own {
		prefix, err := netip.ParsePrefix(a.String())
		if err != nil {
			continue
		}
		if ip := prefix.Addr().Unmap(); !ip.IsLoopback() && !ip.IsLinkLocalUnicast() {
			found = append(found, ip)
		}
	}
	return found
}
