package api

import (
	"net/http"
	"net/url"
	"path"
	"strconv"

	"cloche.dev/agent/internal/tunnel"
	"cloche.dev/agent/internal/users"
	"cloche.dev/agent/internal/wire"
)

// tunnelCalls are those of §5 of the protocol.
func (a *API) tunnelCalls() map[string]call {
	return map[string]call{
		"POST /v1/tcp":    a.tcp,
		"POST /v1/unix":   a.unix,
		"POST /v1/listen": a.listen,
		"POST /v1/accept": a.accept,
		"GET /v1/ports":   a.ports,
	}
}

func (a *API) tcp(w http.ResponseWriter, r *http.Request) error {
	port, err := strconv.Atoi(r.URL.Query().Get("port"))
	if err != nil || port < 1 || port > 65535 {
		return wire.BadRequest("port", "want 1 to 65535")
	}
	conn, err := tunnel.Dial(r.Context(), port)
	if err != nil {
		return err
	}
	return join(w, r, conn)
}

// join carries a connection. Too late for an answer then: a reset tells the host
// that it is not whole.
func join(w http.ResponseWriter, r *http.Request, conn tunnel.Conn) error {
	if err := tunnel.Serve(r.Context(), w, r.Body, conn); err != nil {
		panic(http.ErrAbortHandler)
	}
	return nil
}

func (a *API) unix(w http.ResponseWriter, r *http.Request) error {
	where, user, err := a.socket(r)
	if err != nil {
		return err
	}
	conn, err := tunnel.DialUnix(user, where)
	if err != nil {
		return err
	}
	return join(w, r, conn)
}

// socket reads the path of a Unix socket, and who asks for it.
func (a *API) socket(r *http.Request) (string, *users.Identity, error) {
	q, err := a.query(r)
	if err != nil {
		return "", nil, err
	}
	if !path.IsAbs(q.path) {
		return "", nil, wire.BadRequest("path", "want an absolute path")
	}
	return q.path, q.user, nil
}

func (a *API) listen(w http.ResponseWriter, r *http.Request) error {
	values, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return wire.BadRequest("port", "malformed query")
	}
	var where tunnel.Where
	var user *users.Identity
	if values.Has("port") {
		where.Port, err = strconv.Atoi(values.Get("port"))
		if err != nil || where.Port < 0 || where.Port > 65535 {
			return wire.BadRequest("port", "want 0 to 65535")
		}
		user, err = a.Users.Resolve(values.Get("user"))
	} else {
		where.Path, user, err = a.socket(r)
	}
	if err != nil {
		return err
	}
	out := newLines(w)
	return out.end(a.Tunnels.Listen(r.Context(), user, where, out.emit))
}

func (a *API) accept(w http.ResponseWriter, r *http.Request) error {
	conn, err := a.Tunnels.Claim(r.URL.Query().Get("id"))
	if err != nil {
		return err
	}
	return join(w, r, conn)
}

func (a *API) ports(w http.ResponseWriter, _ *http.Request) error {
	found := tunnel.Ports()
	if found == nil {
		found = []tunnel.Port{}
	}
	return reply(w, http.StatusOK, struct {
		Ports []tunnel.Port `json:"ports"`
	}{found})
}
