package e2e

import (
	"bytes"
	"context"
	order "encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cloche.dev/agent/internal/tunnel"
	"cloche.dev/agent/internal/wire"
)

// pipe is a tunnel that is open.
type pipe struct {
	up   *io.PipeWriter
	down io.ReadCloser
}

func (a *agent) tunnel(port int) (*pipe, error) {
	a.t.Helper()
	body, up := io.Pipe()
	res, err := a.Open(context.Background(), "POST", fmt.Sprintf("/v1/tcp?port=%d", port), body)
	if err != nil {
		_ = up.Close()
		return nil, err
	}
	a.t.Cleanup(func() { _ = res.Body.Close() })
	return &pipe{up, res.Body}, nil
}

// next is the payload of the next frame; empty when the server has ended.
func (p *pipe) next() ([]byte, error) {
	var h [4]byte
	if _, err := io.ReadFull(p.down, h[:]); err != nil {
		return nil, err
	}
	b := make([]byte, order.BigEndian.Uint32(h[:]))
	if len(b) > tunnel.MaxPayload {
		return nil, fmt.Errorf("a frame of %d bytes", len(b))
	}
	_, err := io.ReadFull(p.down, b)
	return b, err
}

// all reads up to the frame that says that the server has ended.
func (p *pipe) all() ([]byte, error) {
	var got []byte
	for {
		b, err := p.next()
		if err != nil || len(b) == 0 {
			return got, err
		}
		got = append(got, b...)
	}
}

// listen serves each connection with fn.
func listen(t *testing.T, network, address string, fn func(c *net.TCPConn)) int {
	t.Helper()
	l, err := net.Listen(network, address)
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go fn(c.(*net.TCPConn))
		}
	}()
	return l.Addr().(*net.TCPAddr).Port
}

func echo(c *net.TCPConn) {
	defer c.Close()
	_, _ = io.Copy(c, c)
}

func TestTunnelAddresses(t *testing.T) {
	a := start(t)
	for _, where := range [][2]string{{"tcp4", "127.0.0.1:0"}, {"tcp6", "[::1]:0"}, {"tcp4", "0.0.0.0:0"}, {"tcp6", "[::]:0"}, {"tcp4", own(t)}} {
		t.Run(where[1], func(t *testing.T) {
			p, err := a.tunnel(listen(t, where[0], where[1], echo))
			if err != nil {
				t.Fatal(err)
			}
			_, _ = p.up.Write([]byte("hello"))
			if b, err := p.next(); string(b) != "hello" {
				t.Fatalf("%q %v", b, err)
			}
			_ = p.up.Close()
			if b, err := p.all(); len(b) != 0 || err != nil {
				t.Fatalf("%q %v", b, err)
			}
			if _, err := p.next(); err != io.EOF {
				t.Errorf("behind the end: %v", err)
			}
		})
	}
}

// own is an address of this machine that is not of the loopback device.
func own(t *testing.T) string {
	addresses, _ := net.InterfaceAddrs()
	for _, a := range addresses {
		if ip := a.(*net.IPNet).IP; !ip.IsLoopback() && ip.To4() != nil {
			return ip.String() + ":0"
		}
	}
	return "127.0.0.2:0"
}

func TestTunnelRefusals(t *testing.T) {
	a := start(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := l.Addr().(*net.TCPAddr).Port
	_ = l.Close()
	for port, want := range map[int]int{closed: 404, 0: 400, 65536: 400, -1: 400} {
		_, err := a.tunnel(port)
		var e *wire.Error
		if !errors.As(err, &e) || e.Status != want || e.Field != "port" {
			t.Errorf("port %d: %v", port, err)
		}
	}
}

// TestTunnelHalfClose has either side end first.
func TestTunnelHalfClose(t *testing.T) {
	a := start(t)
	last := listen(t, "tcp4", "127.0.0.1:0", func(c *net.TCPConn) {
		defer c.Close()
		b, _ := io.ReadAll(c)
		_, _ = fmt.Fprintf(c, "got %d", len(b))
	})
	p, err := a.tunnel(last)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = p.up.Write(make([]byte, 300_000))
	_ = p.up.Close()
	if b, err := p.all(); string(b) != "got 300000" || err != nil {
		t.Errorf("%q %v", b, err)
	}
	heard := make(chan string, 1)
	first := listen(t, "tcp4", "127.0.0.1:0", func(c *net.TCPConn) {
		defer c.Close()
		_, _ = c.Write([]byte("bye"))
		_ = c.CloseWrite()
		b, _ := io.ReadAll(c)
		heard <- string(b)
	})
	if p, err = a.tunnel(first); err != nil {
		t.Fatal(err)
	}
	if b, err := p.all(); string(b) != "bye" || err != nil {
		t.Errorf("%q %v", b, err)
	}
	_, _ = p.up.Write([]byte("still here"))
	_ = p.up.Close()
	if got := <-heard; got != "still here" {
		t.Errorf("the server heard %q", got)
	}
	if _, err := p.next(); err != io.EOF {
		t.Errorf("at the end: %v", err)
	}
}

// TestTunnelReset tells an end from a break, both ways.
func TestTunnelReset(t *testing.T) {
	a := start(t)
	broken := make(chan error, 1)
	port := listen(t, "tcp4", "127.0.0.1:0", func(c *net.TCPConn) {
		var b [1]byte
		_, _ = c.Read(b[:])
		if b[0] == 'r' {
			_ = c.SetLinger(0)
			_ = c.Close()
			return
		}
		broken <- nil // a reset that comes before it has read drops what it would read
		_, err := c.Read(b[:])
		broken <- err
	})
	p, err := a.tunnel(port)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = p.up.Write([]byte("r"))
	if _, err := p.all(); err == nil || err == io.EOF {
		t.Errorf("a break of the server: %v", err)
	}
	if p, err = a.tunnel(port); err != nil {
		t.Fatal(err)
	}
	_, _ = p.up.Write([]byte("x"))
	<-broken
	_ = p.down.Close()
	if err := <-broken; err == nil || err == io.EOF {
		t.Errorf("a break of the host: %v", err)
	}
}

// TestTunnelStalls lets many tunnels stand still, both ways; the others move.
func TestTunnelStalls(t *testing.T) {
	a := start(t)
	deaf := listen(t, "tcp4", "127.0.0.1:0", func(c *net.TCPConn) { _, _ = c.Write(bytes.Repeat([]byte("x"), 16<<20)) })
	for range 20 {
		p, err := a.tunnel(deaf)
		if err != nil {
			t.Fatal(err)
		}
		// More than all buffers below it take.
		go func() { _, _ = p.up.Write(make([]byte, 16<<20)) }()
	}
	p, err := a.tunnel(listen(t, "tcp4", "127.0.0.1:0", echo))
	if err != nil {
		t.Fatal(err)
	}
	want := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	go func() {
		_, _ = p.up.Write(want)
		_ = p.up.Close()
	}()
	if got, err := p.all(); !bytes.Equal(got, want) || err != nil {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if r := a.shell("echo still here"); string(r.Stdout) != "still here\n" {
		t.Errorf("%q", r.Stdout)
	}
}

// TestTunnelSession frees the connection when the host goes away.
func TestTunnelSession(t *testing.T) {
	a := start(t)
	gone := make(chan error, 1)
	port := listen(t, "tcp4", "127.0.0.1:0", func(c *net.TCPConn) {
		_, err := io.ReadAll(c)
		gone <- err
	})
	if _, err := a.tunnel(port); err != nil {
		t.Fatal(err)
	}
	a.Client.Close()
	if err := <-gone; err == nil {
		t.Error("the server saw an orderly end")
	}
	before := fds(a.pid)
	a.Client = a.connect()
	for range 50 {
		p, err := a.tunnel(listen(t, "tcp4", "127.0.0.1:0", echo))
		if err != nil {
			t.Fatal(err)
		}
		_ = p.down.Close()
	}
	eventually(t, "the descriptors are closed", func() bool { return fds(a.pid) <= before+2 })
}

func fds(pid int) int {
	all, _ := os.ReadDir(filepath.Join("/proc", fmt.Sprint(pid), "fd"))
	return len(all)
}

func TestPorts(t *testing.T) {
	a := start(t)
	port := listen(t, "tcp4", "127.0.0.1:0", echo)
	six := listen(t, "tcp6", "[::1]:0", echo)
	var answer struct {
		Ports []tunnel.Port `json:"ports"`
	}
	a.call("GET", "/v1/ports", nil, &answer)
	found := map[int]tunnel.Port{}
	for _, p := range answer.Ports {
		found[p.Port] = p
	}
	if p := found[port]; p.Address != "127.0.0.1" || p.PID != os.Getpid() || !strings.Contains(p.Process, "e2e") {
		t.Errorf("got %+v", p)
	}
	if p := found[six]; p.Address != "::1" {
		t.Errorf("got %+v", p)
	}
}
