package api

import (
	"io"
	"net/http"
	"strings"

	"cloche.dev/agent/internal/services"
	"cloche.dev/agent/internal/wire"
)

// services are the calls of docs/agent-protocol.md §3.7.
func (a *API) serviceCalls() map[string]call {
	return map[string]call{
		"GET /v1/services":                a.serviceList,
		"GET /v1/service-events":          a.serviceEvents,
		"GET /v1/services/{name}":         a.serviceInfo,
		"PUT /v1/services/{name}":         a.servicePut,
		"DELETE /v1/services/{name}":      a.serviceRemove,
		"GET /v1/services/{name}/wait":    a.serviceWait,
		"GET /v1/services/{name}/output":  a.serviceOutput,
		"POST /v1/services/{name}/{verb}": a.serviceDo,
	}
}

func (a *API) serviceList(w http.ResponseWriter, _ *http.Request) error {
	return reply(w, http.StatusOK, struct {
		Services []services.Info `json:"services"`
		BootID   string          `json:"boot_id"`
	}{a.Services.List(), a.bootID()})
}

func (a *API) tellService(w http.ResponseWriter, name string, status int) error {
	info, err := a.Services.Get(name)
	if err != nil {
		return err
	}
	return reply(w, status, info)
}

func (a *API) serviceInfo(w http.ResponseWriter, r *http.Request) error {
	return a.tellService(w, r.PathValue("name"), http.StatusOK)
}

func (a *API) servicePut(w http.ResponseWriter, r *http.Request) error {
	b, err := io.ReadAll(io.LimitReader(r.Body, services.MaxSpec+1))
	if err != nil {
		return wire.BadRequest("body", "the request was cut short")
	}
	if len(b) > services.MaxSpec {
		return wire.TooLarge("body", "the definition is over 131072 bytes")
	}
	name := r.PathValue("name")
	spec, err := services.Parse(name, b)
	if err != nil {
		return err
	}
	created, err := a.Services.Put(r.Context(), spec)
	if err != nil {
		return err
	}
	status := http.StatusOK
	if created {
		status = http.StatusCreated
	}
	return a.tellService(w, name, status)
}

func (a *API) serviceRemove(w http.ResponseWriter, r *http.Request) error {
	if err := a.Services.Remove(r.Context(), r.PathValue("name")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (a *API) serviceDo(w http.ResponseWriter, r *http.Request) error {
	name, verb := r.PathValue("name"), r.PathValue("verb")
	switch verb {
	case "start", "stop", "restart":
	default:
		return noSuchCall(w, r)
	}
	if err := a.Services.Do(r.Context(), name, verb); err != nil {
		return err
	}
	return a.tellService(w, name, http.StatusOK)
}

func (a *API) serviceWait(w http.ResponseWriter, r *http.Request) error {
	limit, err := wait(r, 0)
	if err != nil {
		return err
	}
	states := strings.Split(r.URL.Query().Get("states"), ",")
	info, err := a.Services.Wait(r.Context(), r.PathValue("name"), states, limit)
	if err != nil {
		return err
	}
	return reply(w, http.StatusOK, info)
}

func (a *API) serviceOutput(w http.ResponseWriter, r *http.Request) error {
	from, stream, err := position(r)
	if err != nil {
		return err
	}
	return a.Services.Output(r.Context(), w, r.PathValue("name"), stream, from)
}

// maxPlace bounds the place after which events are asked for.
const maxPlace = 64

func (a *API) serviceEvents(w http.ResponseWriter, r *http.Request) error {
	limit, err := wait(r, 0)
	if err != nil {
		return err
	}
	after := r.URL.Query().Get("after")
	if len(after) > maxPlace {
		return wire.BadRequest("after", "want a place that an answer has told")
	}
	return reply(w, http.StatusOK, a.Services.Events(r.Context(), after, limit))
}
