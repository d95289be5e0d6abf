package tunnel

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"syscall"
	"time"

	"cloche.dev/agent/internal/sys"
	"cloche.dev/agent/internal/users"
	"cloche.dev/agent/internal/wire"
)

const (
	// maxListeners bounds those of all calls together.
	maxListeners = 256
	// maxWaiting is how many connections of one listener wait for the host;
	// more wait in the kernel.
	maxWaiting = 32
	// acceptPause keeps a machine without descriptors from spinning.
	acceptPause = 100 * time.Millisecond
)

// Conn is a connection of which one direction may end before the other.
type Conn interface {
	net.Conn
	CloseWrite() error
}

// Hub has the listeners that the host has asked for, and what has come to them.
type Hub struct {
	mu        sync.Mutex
	listeners int
	last      uint64
	waiting   map[string]*arrival
}

// arrival is a connection that the host has been told of.
type arrival struct {
	conn  Conn
	timer *time.Timer
	free  func()
}

// Where is a port of loopback or, with a path, a Unix socket. Port 0 is any.
type Where struct {
	Port int
	Path string
}

// Event is one line of the answer: `listening`, and then each `accepted`.
type Event struct {
	Type string `json:"type"`
	Port int    `json:"port,omitempty"`
	ID   string `json:"id,omitempty"`
	From string `json:"from,omitempty"`
	// FromPort is the port that the connection comes from.
	FromPort int `json:"from_port,omitempty"`
}

// Listen takes connections for as long as the call lasts, and tells of each.
// The host has claimWithin to Claim it. All that nobody has claimed ends with
// the call. The error is an answer.
func (h *Hub) Listen(ctx context.Context, id *users.Identity, where Where, emit func(any) error) error {
	if !h.enter() {
		return wire.Exhausted("too many listeners")
	}
	defer h.leave()
	found, port, stop, err := open(id, where)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	defer cancel()
	if err := emit(Event{Type: "listening", Port: port}); err != nil {
		return err
	}
	if err := emit(nil); err != nil {
		return err
	}
	slots := make(chan struct{}, maxWaiting)
	failed := make(chan error, len(found))
	for _, l := range found {
		running.Go(func() { failed <- h.accept(ctx, l, slots, emit) })
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case err := <-failed:
		return err
	}
}

// open is one listener, or for a port one of each family that there is.
func open(id *users.Identity, where Where) ([]net.Listener, int, func(), error) {
	if where.Path != "" {
		l, stop, err := listenUnix(id, where.Path)
		return []net.Listener{l}, 0, stop, err
	}
	var found []net.Listener
	err := sys.AsEffective(id.UID, id.GID, id.Groups, func() error {
		four, err := net.Listen("tcp4", netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(where.Port)).String())
		if err != nil {
			return err
		}
		found = append(found, four)
		port := four.Addr().(*net.TCPAddr).Port
		// Whoever says localhost may mean this one. A machine without it is fine.
		if six, err := net.Listen("tcp6", "[::1]:"+strconv.Itoa(port)); err == nil {
			found = append(found, six)
		}
		return nil
	})
	if err != nil {
		if errors.Is(err, syscall.EADDRINUSE) {
			return nil, 0, nil, wire.Conflict("exists", "port", "something listens on the port already")
		}
		return nil, 0, nil, wire.FromErr(err, "port")
	}
	stop := func() {
		for _, l := range found {
			_ = l.Close()
		}
	}
	return found, found[0].Addr().(*net.TCPAddr).Port, stop, nil
}

// accept tells of what comes to one listener. A slot is taken before, so that a
// host that claims nothing is told of no more.
func (h *Hub) accept(ctx context.Context, l net.Listener, slots chan struct{}, emit func(any) error) error {
	for {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return ctx.Err()
		}
		conn, err := l.Accept()
		if err != nil {
			<-slots
			if ctx.Err() == nil && isPassing(err) {
				time.Sleep(acceptPause)
				continue
			}
			return err
		}
		e := Event{Type: "accepted"}
		if from, ok := conn.RemoteAddr().(*net.TCPAddr); ok {
			e.From, e.FromPort = from.IP.String(), from.Port
		}
		e.ID = h.add(ctx, conn.(Conn), func() { <-slots })
		if err := emit(e); err != nil {
			return err
		}
		if err := emit(nil); err != nil {
			return err
		}
	}
}

// isPassing is a failure after which a listener goes on.
func isPassing(err error) bool {
	for _, one := range []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.ENOBUFS, syscall.ECONNABORTED} {
		if errors.Is(err, one) {
			return true
		}
	}
	return false
}

func (h *Hub) enter() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.listeners >= maxListeners {
		return false
	}
	h.listeners++
	return true
}

func (h *Hub) leave() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.listeners--
}

// add keeps a connection until it is claimed, too late, or its call is over.
func (h *Hub) add(ctx context.Context, conn Conn, free func()) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.waiting == nil {
		h.waiting = map[string]*arrival{}
	}
	h.last++
	id := strconv.FormatUint(h.last, 10)
	drop := func() {
		if a := h.take(id); a != nil {
			abort(a.conn)
		}
	}
	over := context.AfterFunc(ctx, drop)
	h.waiting[id] = &arrival{conn, time.AfterFunc(claimWithin, drop), func() { over(); free() }}
	return id
}

func (h *Hub) take(id string) *arrival {
	h.mu.Lock()
	a := h.waiting[id]
	delete(h.waiting, id)
	h.mu.Unlock()
	if a != nil {
		a.timer.Stop()
		a.free()
	}
	return a
}

// Claim gives a connection that was told of. The error is an answer.
func (h *Hub) Claim(id string) (Conn, error) {
	if a := h.take(id); a != nil {
		return a.conn, nil
	}
	return nil, wire.NotFound("id", "this connection waits no more")
}

// resets makes what is closed look broken to the other side.
func resets(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
}
