package api

import (
	"net/http"
	"time"

	"cloche.dev/agent/internal/machine"
	"cloche.dev/agent/internal/wire"
)

func (a *API) info(w http.ResponseWriter, _ *http.Request) error {
	return reply(w, http.StatusOK, a.Machine.Info(a.Procs.Running()))
}

func (a *API) usage(w http.ResponseWriter, _ *http.Request) error {
	return reply(w, http.StatusOK, a.Machine.Usage())
}

func (a *API) renew(w http.ResponseWriter, r *http.Request) error {
	req := machine.Renew{Arrived: time.Now()}
	if err := decode(r, &req); err != nil {
		return err
	}
	if err := req.Check(); err != nil {
		return err
	}
	done, err := a.Machine.Renew(&req)
	if err != nil {
		return err
	}
	if req.Entropy != nil { // it goes on from a memory that was saved
		a.Services.Renewed()
	}
	a.Services.Boot()
	return reply(w, http.StatusOK, done)
}

func (a *API) quiesce(w http.ResponseWriter, _ *http.Request) error {
	a.Machine.Quiesce()
	return reply(w, http.StatusOK, empty{})
}

// freezeTimeout is for a request that names none.
const freezeTimeout = 10 * time.Second

func (a *API) freeze(w http.ResponseWriter, r *http.Request) error {
	req := machine.Freeze{TimeoutMS: freezeTimeout.Milliseconds()}
	if err := decode(r, &req); err != nil {
		return err
	}
	if err := req.Check(); err != nil {
		return err
	}
	done, err := a.Machine.Freeze(r.Context(), &req)
	if err != nil {
		return err
	}
	return reply(w, http.StatusOK, done)
}

func (a *API) thaw(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Keep bool `json:"keep"`
	}
	if err := decode(r, &req); err != nil {
		return err
	}
	if err := a.Machine.Thaw(req.Keep); err != nil {
		return err
	}
	return reply(w, http.StatusOK, empty{})
}

func (a *API) shutdown(w http.ResponseWriter, r *http.Request) error {
	req := struct {
		GraceMS int64 `json:"grace_ms"`
	}{GraceMS: 5000}
	if err := decode(r, &req); err != nil {
		return err
	}
	if req.GraceMS < 0 || req.GraceMS > 600_000 {
		return wire.BadRequest("grace_ms", "want 0 to 600000")
	}
	go func() {
		a.Services.Halt()
		time.Sleep(answerDelay)
		a.Machine.Shutdown(time.Duration(req.GraceMS) * time.Millisecond)
	}()
	return reply(w, http.StatusAccepted, empty{})
}

// answerDelay lets the answer to a shutdown leave the machine.
const answerDelay = 100 * time.Millisecond
