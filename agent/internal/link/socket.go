package link

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
)

// socket is a stream that ends with its first hang-up.
type socket struct{ net.Conn }

func (s socket) ReadWait(p []byte) (int, error) { return s.Read(p) }

// ListenUnix opens the socket of the developer mode, given as "unix:PATH". A
// socket file that nobody listens on any more is replaced.
func ListenUnix(spec string) (net.Listener, error) {
	path, ok := strings.CutPrefix(spec, "unix:")
	if !ok || path == "" {
		return nil, fmt.Errorf("cannot listen on %q: want unix:PATH", spec)
	}
	if c, err := net.Dial("unix", path); err == nil {
		_ = c.Close()
		return nil, fmt.Errorf("%s is in use", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	return net.Listen("unix", path)
}

// ServeListener runs one link per accepted connection, each as the port would.
func (s *Server) ServeListener(l net.Listener) error {
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			_ = NewLink(socket{c}).Run(s)
			_ = c.Close()
		}()
	}
}
