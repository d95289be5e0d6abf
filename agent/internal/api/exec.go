package api

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"time"

	"cloche.dev/agent/internal/proc"
	"cloche.dev/agent/internal/wire"
)

const (
	// forgetWait is how long a command that is forgotten may take to die before
	// the answer is given without it.
	forgetWait = 5 * time.Second
	// inputWait is how long a write waits for its reader unless it says so
	// itself, and longestWait how long any call waits.
	inputWait   = 10 * time.Second
	longestWait = time.Hour
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
		Execs  []proc.Info `json:"execs"`
		BootID string      `json:"boot_id"`
	}{a.Procs.List(), a.bootID()})
}

func (a *API) execInfo(w http.ResponseWriter, r *http.Request) error {
	i, err := a.Procs.Get(r.PathValue("id"))
	if err != nil {
		return err
	}
	return reply(w, http.StatusOK, i)
}

func (a *API) execKill(w http.ResponseWriter, r *http.Request) error {
	kill := a.Procs.Kill
	if s := r.URL.Query().Get("forget"); s == "1" || s == "true" {
		kill = func(id string) error {
			ctx, cancel := context.WithTimeout(r.Context(), forgetWait)
			defer cancel()
			return a.Procs.Forget(ctx, id)
		}
	}
	if err := kill(r.PathValue("id")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (a *API) execOutput(w http.ResponseWriter, r *http.Request) error {
	from, stream, err := position(r)
	if err != nil {
		return err
	}
	return a.Procs.Output(r.Context(), w, r.PathValue("id"), stream, from)
}

// position reads the parameters from and stream.
func position(r *http.Request) (from uint64, stream byte, err error) {
	if s := r.URL.Query().Get("from"); s != "" {
		if from, err = strconv.ParseUint(s, 10, 63); err != nil {
			return 0, 0, wire.BadRequest("from", "want a number")
		}
	}
	switch r.URL.Query().Get("stream") {
	case "":
	case "stdout":
		stream = wire.TypeStdout
	case "stderr":
		stream = wire.TypeStderr
	default:
		return 0, 0, wire.BadRequest("stream", "want stdout or stderr")
	}
	return from, stream, nil
}

// wait reads the parameter timeout_ms.
func wait(r *http.Request, absent time.Duration) (time.Duration, error) {
	s := r.URL.Query().Get("timeout_ms")
	if s == "" {
		return absent, nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 0 || n > longestWait.Milliseconds() {
		return 0, wire.BadRequest("timeout_ms", "want 0 to 3600000")
	}
	return time.Duration(n) * time.Millisecond, nil
}

func (a *API) execWait(w http.ResponseWriter, r *http.Request) error {
	limit, err := wait(r, 0)
	if err != nil {
		return err
	}
	i, err := a.Procs.Wait(r.Context(), r.PathValue("id"), limit)
	if err != nil {
		return err
	}
	return reply(w, http.StatusOK, i)
}

func (a *API) execInput(w http.ResponseWriter, r *http.Request) error {
	limit, err := wait(r, inputWait)
	if err != nil {
		return err
	}
	b, err := io.ReadAll(io.LimitReader(r.Body, proc.MaxInput+1))
	if err != nil {
		return wire.BadRequest("body", "the request was cut short")
	}
	if len(b) > proc.MaxInput {
		return wire.TooLarge("body", "more than 262144 bytes at once")
	}
	id := r.PathValue("id")
	done, err := a.Procs.Input(r.Context(), id, b, limit)
	if err != nil {
		return err
	}
	if s := r.URL.Query().Get("close"); (s == "1" || s == "true") && done.Bytes == len(b) {
		if err := a.Procs.CloseInput(r.Context(), id); err != nil {
			return err
		}
		done.Closed = true
	}
	return reply(w, http.StatusOK, done)
}

// execFeed answers before it reads, so that the host can send as long as it likes.
func (a *API) execFeed(w http.ResponseWriter, r *http.Request) error {
	feed, err := a.Procs.Feed(r.PathValue("id"))
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	if err := http.NewResponseController(w).Flush(); err != nil {
		panic(http.ErrAbortHandler)
	}
	done, err := feed.From(r.Context(), r.Body)
	if err != nil {
		panic(http.ErrAbortHandler) // too late for an answer: a reset tells that it is not whole
	}
	_ = json.NewEncoder(w).Encode(done)
	return nil
}

func (a *API) execSignal(w http.ResponseWriter, r *http.Request) error {
	var in struct {
		Signal any    `json:"signal"`
		Target string `json:"target"`
	}
	if err := decode(r, &in); err != nil {
		return err
	}
	name := ""
	switch v := in.Signal.(type) {
	case string:
		name = v
	case float64:
		name = strconv.FormatFloat(v, 'f', -1, 64)
	}
	if err := a.Procs.Signal(r.PathValue("id"), name, in.Target); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (a *API) execResize(w http.ResponseWriter, r *http.Request) error {
	var size proc.Size
	if err := decode(r, &size); err != nil {
		return err
	}
	if err := a.Procs.Resize(r.PathValue("id"), size); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (a *API) processes(w http.ResponseWriter, _ *http.Request) error {
	found, more := a.Procs.Processes()
	return reply(w, http.StatusOK, struct {
		Processes []proc.Process `json:"processes"`
		Truncated bool           `json:"truncated"`
	}{found, more})
}

// bootID tells one start of the machine from another.
func (a *API) bootID() string { return a.Machine.Info(0).BootID }
