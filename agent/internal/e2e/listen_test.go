package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"cloche.dev/agent/internal/tunnel"
	"cloche.dev/agent/internal/wire"
)

// heard is a listener of the agent: what it tells, and its end.
type heard struct {
	lines *bufio.Reader
	end   func()
}

func (a *agent) listen(query string) (*heard, error) {
	a.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	res, err := a.Open(ctx, "POST", "/v1/listen?"+query, nil)
	if err != nil {
		cancel()
		return nil, err
	}
	end := func() { cancel(); _ = res.Body.Close() }
	a.t.Cleanup(end)
	return &heard{bufio.NewReader(res.Body), end}, nil
}

// next is the next event that is no beat.
func (h *heard) next(t *testing.T) tunnel.Event {
	t.Helper()
	for {
		line, err := h.lines.ReadBytes('\n')
		if err != nil {
			t.Fatal(err)
		}
		var e tunnel.Event
		if err := json.Unmarshal(line, &e); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if e.Type != "beat" {
			return e
		}
	}
}

// duplex opens any call that becomes a connection.
func (a *agent) duplex(path string) (*pipe, error) {
	body, up := io.Pipe()
	res, err := a.Open(context.Background(), "POST", path, body)
	if err != nil {
		_ = up.Close()
		return nil, err
	}
	a.t.Cleanup(func() { _ = res.Body.Close() })
	return &pipe{up, res.Body}, nil
}

func status(err error) string {
	e, ok := err.(*wire.Error)
	if !ok {
		return fmt.Sprint(err)
	}
	return fmt.Sprintf("%d %s %s", e.Status, e.Code, e.Field)
}

func TestListenOnAPort(t *testing.T) {
	a := start(t)
	h, err := a.listen("port=0")
	if err != nil {
		t.Fatal(err)
	}
	port := h.next(t).Port
	if port == 0 {
		t.Fatal("no port was told")
	}
	if _, err := a.listen(fmt.Sprintf("port=%d", port)); status(err) != "409 exists port" {
		t.Errorf("a port that is taken: %v", err)
	}
	for _, host := range []string{"127.0.0.1", "::1"} {
		c, err := net.Dial("tcp", net.JoinHostPort(host, fmt.Sprint(port)))
		if err != nil {
			if host == "::1" {
				continue // a machine without IPv6
			}
			t.Fatal(err)
		}
		_, _ = c.Write([]byte("hello"))
		e := h.next(t)
		if e.Type != "accepted" || e.From != host || e.FromPort != c.LocalAddr().(*net.TCPAddr).Port {
			t.Errorf("got %+v", e)
		}
		p, err := a.duplex("/v1/accept?id=" + e.ID)
		if err != nil {
			t.Fatal(err)
		}
		if b, err := p.next(); string(b) != "hello" {
			t.Fatalf("%q %v", b, err)
		}
		_, _ = p.up.Write([]byte("and back"))
		_ = p.up.Close()
		if b, err := io.ReadAll(c); string(b) != "and back" || err != nil {
			t.Errorf("%q %v", b, err)
		}
		_ = c.Close()
		if b, err := p.all(); len(b) != 0 || err != nil {
			t.Errorf("%q %v", b, err)
		}
		if _, err := a.duplex("/v1/accept?id=" + e.ID); status(err) != "404 not_found id" {
			t.Errorf("claimed twice: %v", err)
		}
	}
	// Only loopback: nobody else of the network may come in this way.
	if c, err := net.DialTimeout("tcp", net.JoinHostPort(ownHost(t), fmt.Sprint(port)), time.Second); err == nil {
		_ = c.Close()
		t.Error("the port is open to the network")
	}
}

func ownHost(t *testing.T) string {
	host, _, err := net.SplitHostPort(own(t))
	if err != nil || host == "127.0.0.2" {
		t.Skip("no address of its own")
	}
	return host
}

// TestListenEnds has everything end with the call: the port, and what waits.
func TestListenEnds(t *testing.T) {
	a := start(t)
	h, err := a.listen("port=0")
	if err != nil {
		t.Fatal(err)
	}
	address := fmt.Sprintf("127.0.0.1:%d", h.next(t).Port)
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	id := h.next(t).ID
	h.end()
	if _, err := c.Read(make([]byte, 1)); err == nil || err == io.EOF {
		t.Errorf("what nobody claimed: %v", err)
	}
	eventually(t, "the port is free", func() bool {
		c, err := net.Dial("tcp", address)
		if err == nil {
			_ = c.Close()
		}
		return err != nil
	})
	if _, err := a.duplex("/v1/accept?id=" + id); status(err) != "404 not_found id" {
		t.Errorf("claimed too late: %v", err)
	}
	// And with the session, as when the host dies.
	if h, err = a.listen("port=0"); err != nil {
		t.Fatal(err)
	}
	address = fmt.Sprintf("127.0.0.1:%d", h.next(t).Port)
	a.Client.Close()
	eventually(t, "the port is free", func() bool {
		c, err := net.Dial("tcp", address)
		if err == nil {
			_ = c.Close()
		}
		return err != nil
	})
	a.Client = a.connect()
}

// TestListenFlood has more come than the host claims: it is told of so many and
// no more, and all of them get their turn.
func TestListenFlood(t *testing.T) {
	a := start(t)
	h, err := a.listen("port=0")
	if err != nil {
		t.Fatal(err)
	}
	address := fmt.Sprintf("127.0.0.1:%d", h.next(t).Port)
	for range 100 {
		c, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	before := fds(a.pid)
	if before > 32+40 {
		t.Errorf("%d descriptors are open", before)
	}
	for n := range 100 {
		p, err := a.duplex("/v1/accept?id=" + h.next(t).ID)
		if err != nil {
			t.Fatalf("connection %d: %v", n, err)
		}
		_ = p.up.Close()
		_ = p.down.Close()
	}
}

func TestListenRefusals(t *testing.T) {
	a := start(t)
	long := url.QueryEscape("/tmp/" + string(bytes.Repeat([]byte("x"), 110)))
	for query, want := range map[string]string{
		"port=65536":                   "400 bad_request port",
		"port=-1":                      "400 bad_request port",
		"port=x":                       "400 bad_request port",
		"port=8099&user=nosuchuser":    "404 not_found user",
		"port=81&user=nobody":          "403 permission_denied port",
		"path=relative":                "400 bad_request path",
		"":                             "400 bad_request path",
		"path=/nosuchdirectory/s":      "404 not_found path",
		"path=/etc/s&user=nobody":      "403 permission_denied path",
		"path=" + long:                 "413 too_large path",
		"path=/etc/passwd":             "409 exists path",
		"path=/etc/passwd&user=nobody": "409 exists path",
	} {
		if _, err := a.listen(query); status(err) != want {
			t.Errorf("%s: %v, want %s", query, status(err), want)
		}
	}
}

// TestUnixSockets has both directions of Unix sockets, as a user that is not root.
func TestUnixSockets(t *testing.T) {
	a := start(t)
	dir := t.TempDir()
	for d := dir; d != "/tmp" && d != "/"; d = filepath.Dir(d) {
		_ = os.Chmod(d, 0o777)
	}
	path := filepath.Join(dir, "s")
	h, err := a.listen("path=" + path + "&user=nobody")
	if err != nil {
		t.Fatal(err)
	}
	h.next(t)
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil || st.Uid == 0 || st.Mode&0o777 != 0o600 {
		t.Errorf("the socket: %v, user %d, mode %o", err, st.Uid, st.Mode)
	}
	p, err := a.duplex("/v1/unix?path=" + path + "&user=nobody")
	if err != nil {
		t.Fatal(err)
	}
	q, err := a.duplex("/v1/accept?id=" + h.next(t).ID)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = p.up.Write([]byte("there"))
	if b, err := q.next(); string(b) != "there" {
		t.Errorf("%q %v", b, err)
	}
	_ = p.up.Close()
	if b, err := q.next(); len(b) != 0 || err != nil {
		t.Errorf("%q %v", b, err)
	}
	_, _ = q.up.Write([]byte("back"))
	_ = q.up.Close()
	if b, err := p.all(); string(b) != "back" || err != nil {
		t.Errorf("%q %v", b, err)
	}
	h.end()
	eventually(t, "the socket is removed", func() bool { return syscall.Stat(path, &st) != nil })
}

// TestUnixSocketsObeyTheKernel is told by the peer who connects, and refused
// what the user may not.
func TestUnixSocketsObeyTheKernel(t *testing.T) {
	a := start(t)
	dir := t.TempDir()
	for d := dir; d != "/tmp" && d != "/"; d = filepath.Dir(d) {
		_ = os.Chmod(d, 0o777)
	}
	path := filepath.Join(dir, "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_ = os.Chmod(path, 0o600)
	if _, err := a.duplex("/v1/unix?path=" + path + "&user=nobody"); status(err) != "403 permission_denied path" {
		t.Errorf("a socket of somebody else: %v", status(err))
	}
	_ = os.Chmod(path, 0o666)
	for user, root := range map[string]bool{"nobody": false, "root": true} {
		if _, err := a.duplex("/v1/unix?path=" + path + "&user=" + user); err != nil {
			t.Fatal(err)
		}
		c, err := l.AcceptUnix()
		if err != nil {
			t.Fatal(err)
		}
		raw, _ := c.SyscallConn()
		var cred *syscall.Ucred
		_ = raw.Control(func(fd uintptr) {
			cred, err = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
		})
		if err != nil || (cred.Uid == 0) != root {
			t.Errorf("%s is seen as %+v, %v", user, cred, err)
		}
		_ = c.Close()
	}
	_ = l.Close()
	stale := filepath.Join(dir, "stale")
	if s, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale, Net: "unix"}); err == nil {
		s.SetUnlinkOnClose(false)
		_ = s.Close()
	}
	for where, want := range map[string]string{
		stale: "409 not_listening path", dir: "409 not_listening path", dir + "/none": "404 not_found path",
		"@abstract": "400 bad_request path",
	} {
		if _, err := a.duplex("/v1/unix?path=" + where); status(err) != want {
			t.Errorf("%s: %v, want %s", where, status(err), want)
		}
	}
	if r := a.run(fields{"shell": "id -u", "user": "root"}); string(r.Stdout) != "0\n" {
		t.Errorf("the agent is no longer root: %q", r.Stdout)
	}
}
