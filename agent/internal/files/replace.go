package files

import (
	"bytes"
	"context"
	"io"
	"regexp"
	"syscall"

	"cloche.dev/agent/internal/users"
	"cloche.dev/agent/internal/wire"
)

// ReplaceRequest asks for a change of texts. Without Literal the replacement has
// `$1` or `${name}` for what groups have found, and `$$` for a dollar sign.
type ReplaceRequest struct {
	Paths       []string `json:"paths"`
	PathsB64    []string `json:"paths_b64"`
	Pattern     string   `json:"pattern"`
	Replacement string   `json:"replacement"`
	Literal     bool     `json:"literal"`
	IgnoreCase  bool     `json:"ignore_case"`
	DryRun      bool     `json:"dry_run"`
	// MaxCount is how many places of each file are changed at most, 0 for all.
	MaxCount int `json:"max_count"`
}

// Replaced is what became of one file; Error where it was left as it is.
type Replaced struct {
	Path    string      `json:"path"`
	PathB64 string      `json:"path_b64,omitempty"`
	Count   int         `json:"count"`
	Error   *wire.Error `json:"error,omitempty"`
}

const (
	maxReplacePaths = 1000
	// maxReplaceFile is the size of a file before and after a change.
	maxReplaceFile = 16 << 20
	// maxPlaces are changed in one file; each costs memory.
	maxPlaces = 200_000
)

// Replace changes each file in one step, or leaves it as it is. One that somebody
// else changes meanwhile is left to them.
func (f *FS) Replace(ctx context.Context, id *users.Identity, r *ReplaceRequest) ([]Replaced, error) {
	re, err := compileExpression(r.Pattern, r.Literal, r.IgnoreCase)
	if err != nil {
		return nil, err
	}
	paths := r.Paths
	for _, s := range r.PathsB64 {
		b, err := B64.DecodeString(s)
		if err != nil {
			return nil, wire.BadRequest("paths_b64", "not valid base64url")
		}
		paths = append(paths, string(b))
	}
	if len(paths) == 0 || len(paths) > maxReplacePaths {
		return nil, wire.BadRequest("paths", "want 1 to 1000 paths")
	}
	for _, p := range paths {
		if err := CheckPath("paths", p); err != nil {
			return nil, err
		}
	}
	out := make([]Replaced, 0, len(paths))
	for _, p := range paths {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		one := Replaced{}
		one.Path, one.PathB64 = exact(p)
		if one.Count, err = f.replaceIn(id, p, re, r); err != nil {
			one.Count, one.Error = 0, wire.FromErr(err, "path")
		}
		out = append(out, one)
	}
	return out, nil
}

func (f *FS) replaceIn(id *users.Identity, path string, re *regexp.Regexp, r *ReplaceRequest) (int, error) {
	c, err := f.Open(id, path)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	if c.Tag == "" {
		return 0, wire.Conflict("not_a_regular_file", "path", "it is not a regular file")
	}
	if c.Size > maxReplaceFile {
		return 0, syscall.EFBIG
	}
	old, err := io.ReadAll(io.LimitReader(c.file, maxReplaceFile+1))
	if err != nil {
		return 0, err
	}
	made, n, err := substitute(old, re, r)
	if err != nil || n == 0 || r.DryRun || bytes.Equal(made, old) {
		return n, err
	}
	// A file that cannot be written has to fail also when it could be replaced.
	_, err = f.Write(id, &Put{Path: path, If: Conditions{Match: []string{c.Tag}}}, bytes.NewReader(made))
	return n, err
}

// substitute makes the new content, and says how many places have changed.
func substitute(old []byte, re *regexp.Regexp, r *ReplaceRequest) ([]byte, int, error) {
	limit := maxPlaces + 1
	if r.MaxCount > 0 {
		limit = min(limit, r.MaxCount)
	}
	found := re.FindAllSubmatchIndex(old, limit)
	if len(found) > maxPlaces {
		return nil, 0, syscall.EFBIG
	}
	out := make([]byte, 0, len(old))
	at := 0
	for _, m := range found {
		out = append(out, old[at:m[0]]...)
		if r.Literal {
			out = append(out, r.Replacement...)
		} else {
			out = re.Expand(out, []byte(r.Replacement), old, m)
		}
		at = m[1]
		if len(out) > maxReplaceFile {
			return nil, 0, syscall.EFBIG
		}
	}
	return append(out, old[at:]...), len(found), nil
}
