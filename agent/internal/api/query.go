package api

import (
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"cloche.dev/agent/internal/files"
	"cloche.dev/agent/internal/users"
	"cloche.dev/agent/internal/wire"
)

// query is what all file calls share.
type query struct {
	values url.Values
	path   string
	user   *users.Identity
}

func (a *API) query(r *http.Request) (*query, error) {
	v, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, wire.BadRequest("path", "malformed query")
	}
	q := &query{values: v}
	if q.path, err = q.pathField("path"); err != nil {
		return nil, err
	}
	if q.user, err = a.Users.Resolve(v.Get("user")); err != nil {
		return nil, err
	}
	return q, nil
}

// pathField reads NAME, or NAME_b64 for bytes that are not UTF-8.
func (q *query) pathField(name string) (string, error) {
	path := q.values.Get(name)
	if s := q.values.Get(name + "_b64"); s != "" {
		if path != "" {
			return "", wire.BadRequest(name, "given twice")
		}
		var err error
		if path, err = raw(s); err != nil {
			return "", wire.BadRequest(name+"_b64", "not valid base64url")
		}
	}
	return path, files.CheckPath(name, path)
}

// raw decodes base64url with or without its padding.
func raw(s string) (string, error) {
	b, err := files.B64.DecodeString(strings.TrimRight(s, "="))
	return string(b), err
}

func (q *query) flag(name string, absent bool) (bool, error) {
	switch q.values.Get(name) {
	case "":
		return absent, nil
	case "0", "false":
		return false, nil
	case "1", "true":
		return true, nil
	}
	return false, wire.BadRequest(name, "want 0 or 1")
}

// mode reads octal permission bits.
func (q *query) mode() (*uint32, error) {
	s := q.values.Get("mode")
	if s == "" {
		return nil, nil
	}
	n, err := strconv.ParseUint(strings.TrimPrefix(s, "0o"), 8, 32)
	if err != nil || n > 0o7777 {
		return nil, wire.BadRequest("mode", "want an octal number up to 7777")
	}
	m := uint32(n)
	return &m, nil
}

func isEOF(err error) bool { return errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) }
