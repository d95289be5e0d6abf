package api

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"

	"cloche.dev/agent/internal/files"
	"cloche.dev/agent/internal/wire"
)

func (a *API) download(w http.ResponseWriter, r *http.Request) error {
	q, err := a.query(r)
	if err != nil {
		return err
	}
	c, err := a.Files.Open(q.user, q.path)
	if err != nil {
		return err
	}
	defer c.Close()
	h := w.Header()
	h["Content-Type"] = []string{"application/octet-stream"}
	h["Date"] = nil
	h["X-Mode"] = []string{fmt.Sprintf("%04o", c.Mode)}
	h["X-Mtime-Ns"] = []string{strconv.FormatInt(c.MtimeNS, 10)}
	if part, err := q.part(c); err != nil {
		return err
	} else if part != nil {
		h["X-Range"] = []string{fmt.Sprintf("%d-%d/%d", part.First, part.Count, part.Size)}
	}
	if c.Tag != "" {
		h["X-Tag"] = []string{c.Tag}
	}
	if slices.Contains(files.Tags(q.values.Get("unless")), c.Tag) && c.Tag != "" {
		h["X-Unchanged"] = []string{"1"}
		h["X-Size"] = []string{strconv.FormatInt(c.Size, 10)}
		c.Size = 0
	}
	if c.Size >= 0 {
		h["Content-Length"] = []string{strconv.FormatInt(c.Size, 10)}
	}
	if r.Method == http.MethodHead {
		return nil
	}
	if c.CopyTo(w) != nil {
		// Too late for an answer: a reset tells the host that it is not whole.
		panic(http.ErrAbortHandler)
	}
	return nil
}

// part is the one that was asked for, if one was: `first` and `count`, or `last`.
// With `if_range` the file has to be as it was, otherwise all of it is sent.
func (q *query) part(c *files.Content) (*files.Part, error) {
	first, count, last := q.values.Get("first"), q.values.Get("count"), q.values.Get("last")
	if first == "" && last == "" || c.Size < 0 {
		return nil, nil
	}
	if was := q.values.Get("if_range"); was != "" && was != c.Tag {
		return nil, nil
	}
	r := &files.Range{First: -1, Count: -1}
	for _, one := range []struct {
		text string
		to   *int64
	}{{first, &r.First}, {count, &r.Count}, {last, &r.Count}} {
		if one.text == "" {
			continue
		}
		n, err := strconv.ParseInt(one.text, 10, 64)
		if err != nil || n < 0 {
			return nil, wire.BadRequest("first", "want a number")
		}
		*one.to = n
	}
	return c.Cut(r)
}

func (a *API) upload(w http.ResponseWriter, r *http.Request) error {
	q, err := a.query(r)
	if err != nil {
		return err
	}
	p := &files.Put{Path: q.path}
	if p.Mode, err = q.mode(); err != nil {
		return err
	}
	if s := q.values.Get("mtime_ns"); s != "" {
		ns, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			return wire.BadRequest("mtime_ns", "want a number")
		}
		p.MtimeNS = &ns
	}
	if p.Append, err = q.flag("append", false); err != nil {
		return err
	}
	if p.Parents, err = q.flag("parents", true); err != nil {
		return err
	}
	p.If.Match = files.Tags(q.values.Get("if_match"))
	if p.If.Absent, err = q.flag("if_absent", false); err != nil {
		return err
	}
	done, err := a.Files.Write(q.user, p, bodyReader{r})
	if err != nil {
		return err
	}
	return reply(w, http.StatusOK, done)
}

// bodyReader tells a broken upload from trouble with the disk.
type bodyReader struct{ r *http.Request }

func (b bodyReader) Read(p []byte) (int, error) {
	n, err := b.r.Body.Read(p)
	if err != nil && !isEOF(err) {
		err = errors.Join(wire.BadRequest("body", "the upload was cut short"), err)
	}
	return n, err
}

func (a *API) remove(w http.ResponseWriter, r *http.Request) error {
	q, err := a.query(r)
	if err != nil {
		return err
	}
	recursive, err := q.flag("recursive", false)
	if err != nil {
		return err
	}
	if err := a.Files.Remove(q.user, q.path, recursive); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (a *API) list(w http.ResponseWriter, r *http.Request) error {
	q, err := a.query(r)
	if err != nil {
		return err
	}
	limit := files.MaxList
	if s := q.values.Get("limit"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 || n > files.MaxList {
			return wire.BadRequest("limit", "want 1 to 10000")
		}
		limit = n
	}
	after, err := raw(q.values.Get("after"))
	if err != nil {
		return wire.BadRequest("after", "not valid base64url")
	}
	l, err := a.Files.List(q.user, q.path, after, limit)
	if err != nil {
		return err
	}
	return reply(w, http.StatusOK, l)
}

func (a *API) stat(w http.ResponseWriter, r *http.Request) error {
	q, err := a.query(r)
	if err != nil {
		return err
	}
	follow, err := q.flag("follow", false)
	if err != nil {
		return err
	}
	e, err := a.Files.Stat(q.user, q.path, follow)
	if err != nil {
		return err
	}
	return reply(w, http.StatusOK, e)
}

func (a *API) mkdir(w http.ResponseWriter, r *http.Request) error {
	q, err := a.query(r)
	if err != nil {
		return err
	}
	mode, err := q.mode()
	if err != nil {
		return err
	}
	parents, err := q.flag("parents", false)
	if err != nil {
		return err
	}
	e, created, err := a.Files.Mkdir(q.user, q.path, mode, parents)
	if err != nil {
		return err
	}
	if created {
		return reply(w, http.StatusCreated, e)
	}
	return reply(w, http.StatusOK, e)
}

func (a *API) move(w http.ResponseWriter, r *http.Request) error {
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
	e, err := a.Files.Move(q.user, q.path, to, overwrite)
	if err != nil {
		return err
	}
	return reply(w, http.StatusOK, e)
}
