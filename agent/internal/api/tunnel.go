package api

import (
	"net/http"
	"strconv"

	"cloche.dev/agent/internal/tunnel"
	"cloche.dev/agent/internal/wire"
)

func (a *API) tcp(w http.ResponseWriter, r *http.Request) error {
	port, err := strconv.Atoi(r.URL.Query().Get("port"))
	if err != nil || port < 1 || port > 65535 {
		return wire.BadRequest("port", "want 1 to 65535")
	}
	conn, err := tunnel.Dial(r.Context(), port)
	if err != nil {
		return err
	}
	if err := tunnel.Serve(r.Context(), w, r.Body, conn); err != nil {
		// Too late for an answer: a reset tells the host that it is not whole.
		panic(http.ErrAbortHandler)
	}
	return nil
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
