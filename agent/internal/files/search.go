package files

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"regexp/syntax"
	"syscall"
	"unicode/utf8"

	"cloche.dev/agent/internal/users"
	"cloche.dev/agent/internal/wire"
)

// Emit sends one line of an answer that comes as it is found. What it returns
// ends the search.
type Emit func(v any) error

// GlobRequest asks for names.
type GlobRequest struct {
	Pattern string   `json:"pattern"`
	Exclude []string `json:"exclude"`
	Type    string   `json:"type"` // "file", "dir", "symlink" or "" for any
	Limit   int      `json:"limit"`
}

// SearchEnd is the last line of a search.
type SearchEnd struct {
	End        bool  `json:"end"`
	Truncated  bool  `json:"truncated"`
	Files      int64 `json:"files"`
	Skipped    int64 `json:"skipped_binary"`
	Unreadable int64 `json:"unreadable"`
}

// Glob sends an Entry for each match, directories in the order of their names.
func (f *FS) Glob(ctx context.Context, id *users.Identity, path string, r *GlobRequest, emit Emit) error {
	g, err := compileGlob("pattern", r.Pattern)
	if err != nil {
		return err
	}
	skip, err := newFilter(nil, r.Exclude)
	if err != nil {
		return err
	}
	end := SearchEnd{End: true}
	w := &walker{ctx: ctx, trouble: f.tolerant(&end)}
	w.fn = func(v *visit) error {
		if v.rel != "" && skip.excluded(v.rel) {
			return errSkipDir
		}
		if v.rel != "" && g.match(v.rel) && (r.Type == "" || typeNames[kind(v.st.Mode)] == r.Type) {
			if end.Files >= int64(r.Limit) {
				end.Truncated = true
				return errStopWalk
			}
			end.Files++
			full := filepath.Join(path, v.rel)
			e := f.describe(v.name, full, &v.st)
			_, b64 := exact(full)
			if err := emit(struct {
				Entry
				PathB64 string `json:"path_b64,omitempty"`
			}{e, b64}); err != nil {
				return err
			}
		}
		if v.isDir() && !g.mayHold(v.rel, v.depth) {
			return errSkipDir
		}
		return nil
	}
	if err := as(id, func() error { return skipped(w.walk(path)) }); err != nil {
		return wire.FromErr(err, "path")
	}
	return emit(end)
}

// skipped: a file that is excluded ends nothing.
func skipped(err error) error {
	if err == errSkipDir {
		return nil
	}
	return err
}

// tolerant counts what cannot be looked into. The root has to be there.
func (f *FS) tolerant(end *SearchEnd) func(string, error) error {
	return func(rel string, err error) error {
		if rel == "" {
			return err
		}
		end.Unreadable++
		return nil
	}
}

// GrepRequest asks for lines.
type GrepRequest struct {
	Pattern    string   `json:"pattern"`
	Literal    bool     `json:"literal"`
	IgnoreCase bool     `json:"ignore_case"`
	Include    []string `json:"include"`
	Exclude    []string `json:"exclude"`
	Context    int      `json:"context"`
	Limit      int      `json:"limit"`
	PerFile    int      `json:"per_file"`
}

// Match is one line. Column counts bytes from 1; Cut says that the line is
// longer than what is shown of it.
type Match struct {
	Path    string   `json:"path"`
	PathB64 string   `json:"path_b64,omitempty"`
	Line    int64    `json:"line"`
	Column  int      `json:"column"`
	Text    string   `json:"text"`
	Cut     bool     `json:"cut,omitempty"`
	Before  []string `json:"before"`
	After   []string `json:"after"`
}

const (
	// searchLine is how much of a line is looked at, shownLine how much of it is sent.
	searchLine = 64 << 10
	shownLine  = 2048
	// binaryLook is where a NUL makes a file a binary one.
	binaryLook = 8 << 10
	// MaxContext is how many lines may be sent around a match.
	MaxContext    = 20
	maxExpression = 16 << 10
	// maxProgram bounds what the repetitions of an expression unfold to.
	maxProgram = 50_000
)

// unfolded estimates the size of a compiled expression.
func unfolded(re *syntax.Regexp) int {
	n := 1 + len(re.Rune)
	for _, sub := range re.Sub {
		n += unfolded(sub)
	}
	if re.Op == syntax.OpRepeat {
		n *= max(re.Min, re.Max, 1)
	}
	return min(n, maxProgram+1)
}

func compileExpression(pattern string, literal, fold bool) (*regexp.Regexp, error) {
	if pattern == "" || len(pattern) > maxExpression {
		return nil, wire.BadRequest("pattern", "want a pattern of 1 to 16384 bytes")
	}
	if literal {
		pattern = regexp.QuoteMeta(pattern)
	}
	if fold {
		pattern = "(?i:" + pattern + ")"
	}
	tree, err := syntax.Parse(pattern, syntax.Perl)
	if err == nil && unfolded(tree) > maxProgram {
		return nil, wire.BadRequest("pattern", "the expression is too large")
	}
	var re *regexp.Regexp
	if err == nil {
		re, err = regexp.Compile(pattern)
	}
	if err != nil {
		message := "not a regular expression of RE2"
		if e, ok := err.(*syntax.Error); ok {
			message += ": " + string(e.Code)
		}
		return nil, wire.BadRequest("pattern", message)
	}
	return re, nil
}

// Grep sends a Match for each line that matches.
func (f *FS) Grep(ctx context.Context, id *users.Identity, path string, r *GrepRequest, emit Emit) error {
	re, err := compileExpression(r.Pattern, r.Literal, r.IgnoreCase)
	if err != nil {
		return err
	}
	choose, err := newFilter(r.Include, r.Exclude)
	if err != nil {
		return err
	}
	s := &search{ctx: ctx, re: re, r: r, emit: emit, in: bufio.NewReaderSize(nil, searchLine)}
	s.end.End = true
	w := &walker{ctx: ctx, trouble: f.tolerant(&s.end)}
	w.fn = func(v *visit) error {
		if v.rel != "" && choose.excluded(v.rel) {
			return errSkipDir
		}
		rel := v.rel
		if rel == "" {
			rel = v.name
		}
		if kind(v.st.Mode) != syscall.S_IFREG || !choose.included(rel) {
			return nil
		}
		return s.file(v, filepath.Join(path, v.rel))
	}
	if err := as(id, func() error { return w.walk(path) }); err != nil {
		return wire.FromErr(err, "path")
	}
	return emit(s.end)
}

type search struct {
	ctx   context.Context
	re    *regexp.Regexp
	r     *GrepRequest
	emit  Emit
	in    *bufio.Reader
	found int
	end   SearchEnd
}

func (s *search) file(v *visit, path string) error {
	fd, err := v.open()
	if err != nil {
		if v.rel == "" {
			return err
		}
		s.end.Unreadable++
		return nil
	}
	file := os.NewFile(uintptr(fd), "")
	defer file.Close()
	s.in.Reset(file)
	head, _ := s.in.Peek(binaryLook)
	if bytes.IndexByte(head, 0) >= 0 {
		s.end.Skipped++
		return nil
	}
	s.end.Files++
	return s.lines(path)
}

// lines looks at each line of a file. A match waits for the lines behind it.
func (s *search) lines(path string) error {
	var before, waiting = []string{}, []*Match{}
	inFile := 0
	for n := int64(1); ; n++ {
		if n%1024 == 0 && s.ctx.Err() != nil {
			return s.ctx.Err()
		}
		line, cut, err := readLine(s.in)
		if err != nil {
			for _, m := range waiting {
				if err := s.emit(m); err != nil {
					return err
				}
			}
			return nil // an error in mid-file is as its end: the rest can't be read
		}
		for len(waiting) > 0 && len(waiting[0].After) >= s.r.Context {
			if err := s.emit(waiting[0]); err != nil {
				return err
			}
			waiting = waiting[1:]
		}
		for _, m := range waiting {
			m.After = append(m.After, shown(line, 0))
		}
		if at := s.re.FindIndex(line); at != nil && (s.r.PerFile == 0 || inFile < s.r.PerFile) {
			if s.found >= s.r.Limit {
				s.end.Truncated = true
				for _, m := range waiting {
					if err := s.emit(m); err != nil {
						return err
					}
				}
				return errStopWalk
			}
			s.found++
			inFile++
			m := &Match{Line: n, Column: at[0] + 1, Before: append([]string{}, before...), After: []string{}}
			m.Path, m.PathB64 = exact(path)
			m.Text, m.Cut = shown(line, at[0]), cut || len(line) > shownLine
			waiting = append(waiting, m)
		}
		if s.r.PerFile > 0 && inFile >= s.r.PerFile && len(waiting) == 0 {
			return nil
		}
		if s.r.Context > 0 {
			if len(before) == s.r.Context {
				before = before[1:]
			}
			before = append(before, shown(line, 0))
		}
	}
}

// readLine is one line without its end. Of a longer one than searchLine the rest
// is passed over.
func readLine(in *bufio.Reader) (line []byte, cut bool, err error) {
	line, err = in.ReadSlice('\n')
	if err == bufio.ErrBufferFull {
		line, cut = bytes.Clone(line), true
		for err == bufio.ErrBufferFull {
			_, err = in.ReadSlice('\n')
		}
	}
	if err == io.EOF && len(line) > 0 {
		err = nil
	}
	line = bytes.TrimSuffix(line, []byte("\n"))
	return bytes.TrimSuffix(line, []byte("\r")), cut, err
}

// shown is the part of a line around a match, as text.
func shown(line []byte, at int) string {
	if len(line) > shownLine {
		from := max(0, min(at-shownLine/4, len(line)-shownLine))
		line = line[from : from+shownLine]
		for len(line) > 0 && from > 0 && !utf8.RuneStart(line[0]) {
			line = line[1:]
		}
	}
	return text(string(line))
}
