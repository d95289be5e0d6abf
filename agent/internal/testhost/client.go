// Package testhost is the host's side of the agent protocol, for tests.
package testhost

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"
)

// Client speaks to one agent over one connection.
type Client struct {
	*http.Client
	conn net.Conn
}

// Dial connects to the agent's socket and brings the link into step. A VM may
// answer late, so wait bounds the whole of it.
func Dial(path string, wait time.Duration) (*Client, error) {
	deadline := time.Now().Add(wait)
	var conn net.Conn
	for {
		c, err := net.Dial("unix", path)
		if err == nil {
			conn = c
			break
		}
		if time.Now().After(deadline) {
			return nil, err
		}
		time.Sleep(5 * time.Millisecond)
	}
	r, err := Synchronise(conn, deadline)
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	c := newClient(&synced{Conn: conn, r: r})
	if err := c.settle(deadline); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return c, nil
}

// errUsedUp is what a second dial of the transport gets.
var errUsedUp = errors.New("the connection is used up")

// settle makes calls until the transport has put the connection where it finds
// it again. It does so some time after it has answered the first call, and
// would dial anew until then.
func (c *Client) settle(deadline time.Time) error {
	for calls := 0; ; {
		res, err := c.Get("http://agent/v1/info")
		switch {
		case err == nil:
			_, _ = io.Copy(io.Discard, res.Body)
			_ = res.Body.Close()
			if calls++; calls == 2 {
				return nil
			}
		case !errors.Is(err, errUsedUp) || time.Now().After(deadline):
			return err
		default:
			time.Sleep(time.Millisecond)
		}
	}
}

func newClient(conn net.Conn) *Client {
	var p http.Protocols
	p.SetUnencryptedHTTP2(true)
	first := make(chan net.Conn, 1)
	first <- conn
	t := &http.Transport{
		Protocols: &p,
		// The window of the connection has to outgrow what all streams may
		// hold unread, or else one reader that sleeps stops all others.
		HTTP2: &http.HTTP2Config{MaxReadFrameSize: 64 << 10, MaxReceiveBufferPerConnection: 1 << 30, MaxReceiveBufferPerStream: 1 << 20},
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			select {
			case c := <-first:
				return c, nil
			default:
				return nil, errUsedUp
			}
		},
	}
	return &Client{Client: &http.Client{Transport: t}, conn: conn}
}

// Close hangs up.
func (c *Client) Close() { _ = c.conn.Close() }

// synced reads through what Synchronise has read ahead.
type synced struct {
	net.Conn
	r io.Reader
}

func (s *synced) Read(p []byte) (int, error) { return s.r.Read(p) }

// Synchronise does §1.1 of the protocol on a fresh connection.
func Synchronise(conn net.Conn, deadline time.Time) (io.Reader, error) {
	var raw [16]byte
	_, _ = rand.Read(raw[:])
	nonce := hex.EncodeToString(raw[:])
	echoes := make(chan string, 64)
	failed := make(chan error, 1)
	last := make(chan string, 1)
	r := bufio.NewReaderSize(conn, 64<<10)
	_ = conn.SetReadDeadline(deadline)
	go readEchoes(r, nonce, echoes, last, failed)
	n := 0
	send := func() error {
		var b bytes.Buffer
		if n > 0 {
			b.Write(bytes.Repeat([]byte("\n"), 16<<10))
		}
		fmt.Fprintf(&b, "\nCLOCHE-SYNC %s %d\n", nonce, n)
		n++
		_ = conn.SetWriteDeadline(deadline)
		_, err := conn.Write(b.Bytes())
		return err
	}
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		if err := send(); err != nil {
			return nil, err
		}
		select {
		case <-echoes:
			last <- fmt.Sprint(n - 1)
			if err := <-failed; err != nil {
				return nil, err
			}
			_ = conn.SetDeadline(time.Time{})
			return r, nil
		case err := <-failed:
			return nil, err
		case <-tick.C:
		}
	}
}

// readEchoes reports the first echo, and on failed the end of the last one.
func readEchoes(r *bufio.Reader, nonce string, echoes chan<- string, last <-chan string, failed chan<- error) {
	seen := map[string]bool{}
	want := ""
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			failed <- err
			return
		}
		f := strings.Fields(line)
		if len(f) != 4 || f[0] != "CLOCHE-SYNC-OK" || f[1] != nonce {
			continue
		}
		seen[f[2]] = true
		if want == "" {
			echoes <- f[2]
			want = <-last
		}
		if seen[want] {
			failed <- nil
			return
		}
	}
}
