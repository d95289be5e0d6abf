package link

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"cloche.dev/agent/internal/wire"
)

// pair gives a served link whose far end stays one byte pipe, as with a
// hang-up that the guest never notices.
func pair(t *testing.T, h http.Handler) net.Conn {
	t.Helper()
	s := NewServer(h)
	go func() { _ = s.Serve() }()
	host, guest := net.Pipe()
	done := make(chan struct{})
	go func() {
		_ = NewLink(socket{guest}).Run(s)
		close(done)
	}()
	t.Cleanup(func() {
		_ = host.Close()
		_ = guest.Close()
		<-done
		_ = s.Close()
	})
	return host
}

// synchronise does the host's part and returns when the last echo is there.
func synchronise(t *testing.T, c net.Conn) {
	t.Helper()
	var raw [16]byte
	_, _ = rand.Read(raw[:])
	nonce := hex.EncodeToString(raw[:])
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	defer func() { _ = c.SetDeadline(time.Time{}) }()
	sent := make(chan int, 1)
	stop := make(chan struct{})
	go func() {
		for n := 0; ; n++ {
			filler := ""
			if n > 0 {
				filler = strings.Repeat("\n", 16<<10)
			}
			_, _ = fmt.Fprintf(c, "%s\nCLOCHE-SYNC %s %d\n", filler, nonce, n)
			select {
			case <-stop:
				sent <- n
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	}()
	waitEcho(t, c, nonce+" ")
	close(stop)
	// Whatever else was echoed comes before this one.
	last := "\nCLOCHE-SYNC-OK " + nonce + " "
	go func() { _, _ = fmt.Fprintf(c, "\nCLOCHE-SYNC %s 999999\n", nonce) }()
	waitEcho(t, c, last+"999999 1\n")
	<-sent
}

func waitEcho(t *testing.T, c net.Conn, text string) {
	t.Helper()
	var seen strings.Builder
	one := make([]byte, 1)
	for !strings.HasSuffix(seen.String(), text) {
		if _, err := c.Read(one); err != nil {
			t.Fatalf("no echo: %v", err)
		}
		seen.Write(one)
	}
}

func client(c net.Conn) *http.Client {
	var p http.Protocols
	p.SetUnencryptedHTTP2(true)
	return &http.Client{Transport: &http.Transport{
		Protocols:   &p,
		DialContext: func(context.Context, string, string) (net.Conn, error) { return c, nil },
	}}
}

// view is a connection that can be abandoned without being closed.
type view struct {
	net.Conn
	dead atomic.Bool
}

func (v *view) Close() error {
	if v.dead.Swap(true) {
		return nil
	}
	return v.SetDeadline(time.Unix(1, 0))
}

func (v *view) Read(p []byte) (int, error) {
	if v.dead.Load() {
		return 0, net.ErrClosed
	}
	return v.Conn.Read(p)
}

func (v *view) Write(p []byte) (int, error) {
	if v.dead.Load() {
		return 0, net.ErrClosed
	}
	return v.Conn.Write(p)
}

// TestUnseenHangUp abandons sessions in the middle of an upload or a download
// and starts over on the same pipe.
func TestUnseenHangUp(t *testing.T) {
	var cancelled atomic.Int32
	host := pair(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/up":
			_, _ = io.Copy(io.Discard, r.Body)
		case "/down":
			for r.Context().Err() == nil {
				if _, err := w.Write(make([]byte, 30000)); err != nil {
					break
				}
			}
			<-r.Context().Done()
			if context.Cause(r.Context()) != wire.ErrSessionLost {
				t.Errorf("the request is over because: %v", context.Cause(r.Context()))
			}
			cancelled.Add(1)
		default:
			_, _ = io.WriteString(w, "hello")
		}
	}))
	downs := 0
	for i := range 20 {
		synchronise(t, host)
		v := &view{Conn: host}
		c := client(v)
		res, err := c.Get("http://agent/")
		if err != nil {
			t.Fatalf("round %d: %v", i, err)
		}
		if b, _ := io.ReadAll(res.Body); string(b) != "hello" {
			t.Fatalf("round %d: got %q", i, b)
		}
		if i%2 == 0 {
			downs++
			res, err := c.Get("http://agent/down")
			if err != nil {
				t.Fatal(err)
			}
			_, _ = io.ReadFull(res.Body, make([]byte, 100_000+i*777))
		} else {
			pr, pw := io.Pipe()
			go func() { _, _ = c.Post("http://agent/up", "", pr) }()
			_, _ = pw.Write(make([]byte, 100_000+i*777))
			_ = pw.CloseWithError(io.ErrUnexpectedEOF)
		}
		_ = v.Close()
	}
	synchronise(t, host) // the last session is over by now
	for deadline := time.Now().Add(5 * time.Second); int(cancelled.Load()) < downs; {
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d downloads were cancelled", cancelled.Load(), downs)
		}
		time.Sleep(time.Millisecond)
	}
}

// TestWhyARequestIsOver tells a request that is taken back from a session that
// is lost.
func TestWhyARequestIsOver(t *testing.T) {
	causes := make(chan error, 1)
	host := pair(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		causes <- context.Cause(r.Context())
	}))
	synchronise(t, host)
	c := client(host)
	ctx, cancel := context.WithCancel(context.Background())
	for _, lost := range []bool{false, true} {
		req, _ := http.NewRequestWithContext(ctx, "GET", "http://agent/", nil)
		if lost {
			req = req.WithContext(context.Background())
		}
		res, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if lost {
			_ = host.Close()
		} else {
			cancel()
		}
		if cause := <-causes; (cause == wire.ErrSessionLost) != lost {
			t.Errorf("lost %v: %v", lost, cause)
		}
		_ = res.Body.Close()
	}
	cancel()
}

// TestConnectionError sends what the HTTP/2 layer must refuse; the link must
// be usable again at once and not after the layer's time of grace.
func TestConnectionError(t *testing.T) {
	host := pair(t, http.NotFoundHandler())
	synchronise(t, host)
	go func() {
		_, _ = io.WriteString(host, preface+"\x00\x00\x00\x04\x00\x00\x00\x00\x00"+
			"\x00\x00\x05\x00\x00\x00\x00\x00\x07hello") // DATA on an idle stream
	}()
	start := time.Now()
	synchronise(t, host)
	if d := time.Since(start); d > 700*time.Millisecond {
		t.Errorf("took %v", d)
	}
}

// TestLineAtFrameBoundary checks that the very line that ends a session is
// answered.
func TestLineAtFrameBoundary(t *testing.T) {
	host := pair(t, http.NotFoundHandler())
	synchronise(t, host)
	nonce := strings.Repeat("ab", 16)
	go func() {
		_, _ = io.WriteString(host, preface+"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
		_, _ = io.WriteString(host, "\nCLOCHE-SYNC "+nonce+" 0\n")
	}()
	_ = host.SetReadDeadline(time.Now().Add(5 * time.Second))
	waitEcho(t, host, "\nCLOCHE-SYNC-OK "+nonce+" 0 1\n")
}
