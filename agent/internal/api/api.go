// Package api maps the HTTP calls of the protocol to what does them.
package api

import (
	"encoding/json"
	"io"
	"net/http"
	"runtime/debug"
	"strconv"

	"cloche.dev/agent/internal/files"
	"cloche.dev/agent/internal/machine"
	"cloche.dev/agent/internal/proc"
	"cloche.dev/agent/internal/services"
	"cloche.dev/agent/internal/tunnel"
	"cloche.dev/agent/internal/users"
	"cloche.dev/agent/internal/wire"
)

// API holds the parts behind the calls.
type API struct {
	Machine *machine.Machine
	Procs   *proc.Manager
	// Services keeps what was defined running; Boot is called with the first
	// renewal of a machine, which has its name, clock and network by then.
	Services *services.Manager
	Files    *files.FS
	Users    *users.DB
	// Tunnels has the listeners that the host has asked for.
	Tunnels tunnel.Hub
	// Log takes what must not happen.
	Log func(format string, args ...any)
}

// call is a handler that may fail.
type call func(w http.ResponseWriter, r *http.Request) error

// handler makes a call answer its errors. One that panics is logged, and costs
// its own stream only.
func (a *API) handler(c call) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			v := recover()
			if v == nil {
				return
			}
			if v != http.ErrAbortHandler {
				a.Log("panic in %s %s: %v\n%s", r.Method, r.URL.Path, v, debug.Stack())
			}
			panic(http.ErrAbortHandler)
		}()
		if err := c(w, r); err != nil {
			wire.FromErr(err, "").WriteTo(w)
		}
	})
}

// Handler routes all calls.
func (a *API) Handler() http.Handler {
	mux := http.NewServeMux()
	for pattern, c := range map[string]call{
		"GET /v1/info":              a.info,
		"POST /v1/renew":            a.renew,
		"POST /v1/quiesce":          a.quiesce,
		"POST /v1/freeze":           a.freeze,
		"POST /v1/thaw":             a.thaw,
		"POST /v1/shutdown":         a.shutdown,
		"GET /v1/usage":             a.usage,
		"POST /v1/exec":             a.exec,
		"GET /v1/exec":              a.execs,
		"GET /v1/exec/{id}":         a.execInfo,
		"DELETE /v1/exec/{id}":      a.execKill,
		"GET /v1/exec/{id}/output":  a.execOutput,
		"GET /v1/exec/{id}/wait":    a.execWait,
		"POST /v1/exec/{id}/stdin":  a.execInput,
		"POST /v1/exec/{id}/feed":   a.execFeed,
		"POST /v1/exec/{id}/signal": a.execSignal,
		"POST /v1/exec/{id}/resize": a.execResize,
		"GET /v1/processes":         a.processes,
		"GET /v1/files":             a.download,
		"PUT /v1/files":             a.upload,
		"DELETE /v1/files":          a.remove,
		"GET /v1/dir":               a.list,
		"GET /v1/stat":              a.stat,
		"POST /v1/mkdir":            a.mkdir,
		"POST /v1/move":             a.move,
		"/":                         noSuchCall,
	} {
		mux.Handle(pattern, a.handler(c))
	}
	for pattern, c := range a.tunnelCalls() {
		mux.Handle(pattern, a.handler(c))
	}
	for pattern, c := range a.serviceCalls() {
		mux.Handle(pattern, a.handler(c))
	}
	for pattern, c := range a.fileTools() {
		mux.Handle(pattern, a.handler(c))
	}
	return mux
}

func noSuchCall(http.ResponseWriter, *http.Request) error {
	return wire.NotFound("", "no such call")
}

// reply sends v as JSON.
func reply(w http.ResponseWriter, status int, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	h := w.Header()
	h["Content-Type"] = []string{"application/json"}
	h["Content-Length"] = []string{strconv.Itoa(len(b))}
	h["Date"] = nil
	w.WriteHeader(status)
	_, _ = w.Write(b)
	return nil
}

type empty struct{}

// maxSmallBody bounds the requests that are not exec or files.
const maxSmallBody = 64 << 10

// decode reads an optional JSON body.
func decode(r *http.Request, v any) error {
	b, err := io.ReadAll(io.LimitReader(r.Body, maxSmallBody+1))
	if err != nil {
		return wire.BadRequest("body", "the request was cut short")
	}
	if len(b) > maxSmallBody {
		return wire.TooLarge("body", "the request is too large")
	}
	if len(b) == 0 {
		return nil
	}
	if err := json.Unmarshal(b, v); err != nil {
		return proc.JSONError(err)
	}
	return nil
}
