package api

import (
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"strings"

	"cloche.dev/agent/internal/files"
	"cloche.dev/agent/internal/proc"
	"cloche.dev/agent/internal/wire"
)

// fileTools are the calls of §4.1 to §4.4 of the protocol.
func (a *API) fileTools() map[string]call {
	return map[string]call{
		"POST /v1/copy":       a.copy,
		"POST /v1/attributes": a.attributes,
		"POST /v1/touch":      a.touch,
		"POST /v1/link":       a.link,
		"GET /v1/readlink":    a.readlink,
		"GET /v1/du":          a.du,
		"GET /v1/df":          a.df,
		"POST /v1/glob":       a.glob,
		"POST /v1/grep":       a.grep,
		"POST /v1/replace":    a.replace,
		"GET /v1/archive":     a.pack,
		"PUT /v1/archive":     a.extract,
		"GET /v1/watch":       a.watch,
	}
}

func (a *API) copy(w http.ResponseWriter, r *http.Request) error {
	q, err := a.query(r)
	if err != nil {
		return err
	}
	to, err := q.pathField("to")
	if err != nil {
		return err
	}
	overwrite, err := q.flag("overwrite", false)
	if err != nil {
		return err
	}
	recursive, err := q.flag("recursive", false)
	if err != nil {
		return err
	}
	e, err := a.Files.Copy(r.Context(), q.user, q.path, to, overwrite, recursive)
	if err != nil {
		return err
	}
	return reply(w, http.StatusOK, e)
}

// number reads a decimal number from low to high.
func (q *query) number(name string, low, high, absent int64) (int64, error) {
	s := q.values.Get(name)
	if s == "" {
		return absent, nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < low || n > high {
		return 0, wire.BadRequest(name, "want a number from "+strconv.FormatInt(low, 10)+" to "+strconv.FormatInt(high, 10))
	}
	return n, nil
}

func (q *query) mtime() (*int64, error) {
	s := q.values.Get("mtime_ns")
	if s == "" {
		return nil, nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return nil, wire.BadRequest("mtime_ns", "want a number")
	}
	return &n, nil
}

func (a *API) attributes(w http.ResponseWriter, r *http.Request) error {
	q, err := a.query(r)
	if err != nil {
		return err
	}
	at := &files.Attributes{}
	if at.Mode, err = q.mode(); err != nil {
		return err
	}
	if at.MtimeNS, err = q.mtime(); err != nil {
		return err
	}
	if at.Recursive, err = q.flag("recursive", false); err != nil {
		return err
	}
	if s := q.values.Get("owner"); s != "" {
		if strings.Contains(s, ":") {
			return wire.BadRequest("owner", "want a user; the group is a field of its own")
		}
		owner, err := a.Users.Resolve(s)
		if err != nil {
			return wire.NotFound("owner", "no such user")
		}
		at.UID = &owner.UID
	}
	if s := q.values.Get("group"); s != "" {
		group, err := a.Users.Resolve("root:" + s)
		if err != nil {
			return wire.NotFound("group", "no such group")
		}
		at.GID = &group.GID
	}
	n, e, err := a.Files.SetAttributes(r.Context(), q.user, q.path, at)
	if err != nil {
		return err
	}
	return reply(w, http.StatusOK, struct {
		Changed int64       `json:"changed"`
		Entry   files.Entry `json:"entry"`
	}{n, e})
}

func (a *API) touch(w http.ResponseWriter, r *http.Request) error {
	q, err := a.query(r)
	if err != nil {
		return err
	}
	mtime, err := q.mtime()
	if err != nil {
		return err
	}
	parents, err := q.flag("parents", true)
	if err != nil {
		return err
	}
	e, created, err := a.Files.Touch(q.user, q.path, mtime, parents)
	if err != nil {
		return err
	}
	if created {
		return reply(w, http.StatusCreated, e)
	}
	return reply(w, http.StatusOK, e)
}

func (a *API) link(w http.ResponseWriter, r *http.Request) error {
	q, err := a.query(r)
	if err != nil {
		return err
	}
	hard, err := q.flag("hard", false)
	if err != nil {
		return err
	}
	overwrite, err := q.flag("overwrite", false)
	if err != nil {
		return err
	}
	parents, err := q.flag("parents", true)
	if err != nil {
		return err
	}
	to, err := q.pathField("to")
	if err != nil && (hard || to == "" || len(to) > 4095) {
		return err // the text of a symbolic link may be relative
	}
	e, err := a.Files.Link(q.user, q.path, to, hard, overwrite, parents)
	if err != nil {
		return err
	}
	return reply(w, http.StatusCreated, e)
}

func (a *API) readlink(w http.ResponseWriter, r *http.Request) error {
	q, err := a.query(r)
	if err != nil {
		return err
	}
	target, err := a.Files.Readlink(q.user, q.path)
	if err != nil {
		return err
	}
	return reply(w, http.StatusOK, struct {
		Target string `json:"target_b64"`
	}{files.B64.EncodeToString([]byte(target))})
}

func (a *API) du(w http.ResponseWriter, r *http.Request) error {
	q, err := a.query(r)
	if err != nil {
		return err
	}
	depth, err := q.number("depth", 0, 64, 0)
	if err != nil {
		return err
	}
	u, err := a.Files.Du(r.Context(), q.user, q.path, int(depth))
	if err != nil {
		return err
	}
	return reply(w, http.StatusOK, u)
}

func (a *API) df(w http.ResponseWriter, r *http.Request) error {
	q, err := a.query(r)
	if err != nil {
		return err
	}
	d, err := a.Files.Df(q.user, q.path)
	if err != nil {
		return err
	}
	return reply(w, http.StatusOK, d)
}

// maxSearchBody bounds the JSON of a search or a replacement.
const maxSearchBody = 8 << 20

// searchBody reads path and user from the query, and the rest from the body.
func (a *API) searchBody(r *http.Request, v any) (*query, error) {
	b, err := io.ReadAll(io.LimitReader(r.Body, maxSearchBody+1))
	if err != nil {
		return nil, wire.BadRequest("body", "the request was cut short")
	}
	if len(b) > maxSearchBody {
		return nil, wire.TooLarge("body", "the request is too large")
	}
	if err := json.Unmarshal(b, v); err != nil {
		return nil, proc.JSONError(err)
	}
	return a.query(r)
}

const maxResults = 100_000

func limit(n *int) error {
	if *n == 0 {
		*n = maxResults
	}
	if *n < 1 || *n > maxResults {
		return wire.BadRequest("limit", "want 1 to 100000")
	}
	return nil
}

func (a *API) glob(w http.ResponseWriter, r *http.Request) error {
	req := &files.GlobRequest{}
	q, err := a.searchBody(r, req)
	if err == nil {
		err = limit(&req.Limit)
	}
	if err != nil {
		return err
	}
	out := newLines(w)
	return out.end(a.Files.Glob(r.Context(), q.user, q.path, req, out.emit))
}

func (a *API) grep(w http.ResponseWriter, r *http.Request) error {
	req := &files.GrepRequest{}
	q, err := a.searchBody(r, req)
	if err == nil {
		err = limit(&req.Limit)
	}
	if err == nil && (req.Context < 0 || req.Context > files.MaxContext || req.PerFile < 0) {
		err = wire.BadRequest("context", "want 0 to 20 lines")
	}
	if err != nil {
		return err
	}
	out := newLines(w)
	return out.end(a.Files.Grep(r.Context(), q.user, q.path, req, out.emit))
}

func (a *API) replace(w http.ResponseWriter, r *http.Request) error {
	req := &files.ReplaceRequest{}
	q, err := a.searchBody(r, req)
	if err != nil {
		return err
	}
	done, err := a.Files.Replace(r.Context(), q.user, req)
	if err != nil {
		return err
	}
	return reply(w, http.StatusOK, struct {
		Files []files.Replaced `json:"files"`
	}{done})
}

func (a *API) pack(w http.ResponseWriter, r *http.Request) error {
	q, err := a.query(r)
	if err != nil {
		return err
	}
	req := &files.PackRequest{
		Path: q.path, Format: q.values.Get("format"), Include: q.values["include"], Exclude: q.values["exclude"],
	}
	if req.SkipUnreadable, err = q.flag("skip_unreadable", false); err != nil {
		return err
	}
	p, err := a.Files.NewPack(r.Context(), q.user, req)
	if err != nil {
		return err
	}
	h := w.Header()
	h["Content-Type"] = []string{p.MediaType()}
	h["Date"] = nil
	for name, n := range map[string]int64{"X-Entries": p.Entries, "X-Bytes": p.Bytes, "X-Skipped": p.Skipped} {
		h[name] = []string{strconv.FormatInt(n, 10)}
	}
	if p.WriteTo(r.Context(), w) != nil {
		panic(http.ErrAbortHandler)
	}
	return nil
}

func (a *API) extract(w http.ResponseWriter, r *http.Request) error {
	q, err := a.query(r)
	if err != nil {
		return err
	}
	req := &files.ExtractRequest{Path: q.path, Format: q.values.Get("format")}
	if req.MaxBytes, err = q.number("max_bytes", 1, 1<<62, 0); err != nil {
		return err
	}
	if req.MaxEntries, err = q.number("max_entries", 1, 1<<40, 0); err != nil {
		return err
	}
	strip, err := q.number("strip", 0, 64, 0)
	if err != nil {
		return err
	}
	req.Strip = int(strip)
	done, err := a.Files.Extract(r.Context(), q.user, req, bodyReader{r})
	if err != nil {
		return err
	}
	return reply(w, http.StatusOK, done)
}

func (a *API) watch(w http.ResponseWriter, r *http.Request) error {
	q, err := a.query(r)
	if err != nil {
		return err
	}
	recursive, err := q.flag("recursive", false)
	if err != nil {
		return err
	}
	most, err := q.number("watches", 1, files.MaxWatches, files.DefaultWatches)
	if err != nil {
		return err
	}
	watch, err := a.Files.NewWatch(q.user, q.path, recursive, int(most))
	if err != nil {
		return err
	}
	out := newLines(w)
	return out.end(watch.Run(r.Context(), out.emit))
}
