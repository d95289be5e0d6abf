package api

import (
	"net/http"
	"strconv"

	"cloche.dev/agent/internal/proc"
	"cloche.dev/agent/internal/wire"
)

func (a *API) exec(w http.ResponseWriter, r *http.Request) error {
	req, err := proc.ParseRequest(r.Body)
	if err != nil {
		return err
	}
	return a.Procs.Serve(r.Context(), w, req)
}

func (a *API) execs(w http.ResponseWriter, _ *http.Request) error {
	return reply(w, http.StatusOK, struct {
		Execs []proc.Info `json:"execs"`
	}{a.Procs.List()})
}

func (a *API) execInfo(w http.ResponseWriter, r *http.Request) error {
	i, err := a.Procs.Get(r.PathValue("id"))
	if err != nil {
		return err
	}
	return reply(w, http.StatusOK, i)
}

func (a *API) execKill(w http.ResponseWriter, r *http.Request) error {
	if err := a.Procs.Kill(r.PathValue("id")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (a *API) execOutput(w http.ResponseWriter, r *http.Request) error {
	var from uint64
	if s := r.URL.Query().Get("from"); s != "" {
		n, err := strconv.ParseUint(s, 10, 63)
		if err != nil {
			return wire.BadRequest("from", "want a number")
		}
		from = n
	}
	return a.Procs.Output(r.Context(), w, r.PathValue("id"), from)
}
