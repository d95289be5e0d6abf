package tunnel

import (
	"errors"
	"net"
	"net/http"
	"syscall"
	"time"

	"cloche.dev/agent/internal/sys"
	"cloche.dev/agent/internal/users"
	"cloche.dev/agent/internal/wire"
)

// maxUnixPath is what fits into the address of a Unix socket.
const maxUnixPath = 107

// DialUnix connects to a Unix socket of this machine as a user, who has to be
// allowed to write to it. The error is an answer.
func DialUnix(id *users.Identity, path string) (Conn, error) {
	if err := checkUnixPath(path); err != nil {
		return nil, err
	}
	var conn net.Conn
	err := sys.AsEffective(id.UID, id.GID, id.Groups, func() error {
		var err error
		d := net.Dialer{Timeout: dialEach}
		conn, err = d.Dial("unix", path)
		return err
	})
	if err == nil {
		return conn.(*net.UnixConn), nil
	}
	switch {
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.EPROTOTYPE):
		return nil, wire.Conflict("not_listening", "path", "nobody listens there")
	case errors.Is(err, syscall.EAGAIN):
		return nil, &wire.Error{
			Status: http.StatusGatewayTimeout, Code: "timeout", Field: "path", Message: "it takes no connection now",
		}
	}
	return nil, wire.FromErr(err, "path")
}

func checkUnixPath(path string) error {
	if len(path) > maxUnixPath {
		return wire.TooLarge("path", "a Unix socket has a path of at most 107 bytes")
	}
	return nil
}

// listenUnix makes a Unix socket that belongs to a user, and that nobody else
// may connect to. stop ends it and removes it.
func listenUnix(id *users.Identity, path string) (net.Listener, func(), error) {
	if err := checkUnixPath(path); err != nil {
		return nil, nil, err
	}
	var l *net.UnixListener
	var made syscall.Stat_t
	err := sys.AsEffective(id.UID, id.GID, id.Groups, func() error {
		found, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			return err
		}
		// By the user, below: root could be led to another file by then.
		found.SetUnlinkOnClose(false)
		l = found
		if err = syscall.Chmod(path, 0o600); err == nil {
			err = syscall.Lstat(path, &made)
		}
		return err
	})
	if err != nil {
		if l != nil {
			_ = l.Close()
		}
		if errors.Is(err, syscall.EADDRINUSE) {
			return nil, nil, wire.Conflict("exists", "path", "it exists already")
		}
		return nil, nil, wire.FromErr(err, "path")
	}
	stop := func() {
		_ = l.Close()
		_ = sys.AsEffective(id.UID, id.GID, id.Groups, func() error {
			var st syscall.Stat_t
			if err := syscall.Lstat(path, &st); err != nil || st.Ino != made.Ino || st.Dev != made.Dev {
				return err
			}
			return syscall.Unlink(path)
		})
	}
	return l, stop, nil
}

// claimWithin is how long a connection waits for the host.
const claimWithin = 30 * time.Second
