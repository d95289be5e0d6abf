package files

import (
	"regexp"
	"strings"

	"cloche.dev/agent/internal/wire"
)

const (
	maxPattern  = 4096
	maxPatterns = 100
)

// glob is a compiled pattern. `*` and `?` stand for anything but `/`, `**` as a
// whole component for any number of directories, `[a-z]` and `[!a-z]` for one
// character, `{a,b}` for either; `\` takes the meaning away.
type glob struct {
	re *regexp.Regexp
	// depth is how many components a match has, -1 for any number.
	depth int
	// fixed is the beginning, whole components, that every match has.
	fixed string
}

// compileGlob refuses what is not a pattern. RE2 takes time linear in the name,
// whatever the pattern is.
func compileGlob(field, pattern string) (*glob, error) {
	if pattern == "" || len(pattern) > maxPattern {
		return nil, wire.BadRequest(field, "want a pattern of 1 to 4096 bytes")
	}
	if strings.HasPrefix(pattern, "/") {
		return nil, wire.BadRequest(field, "want a pattern relative to the directory")
	}
	p := &globParser{in: pattern}
	body, ok := p.run()
	if !ok {
		return nil, wire.BadRequest(field, "the pattern has a bracket, a brace or a backslash without its end")
	}
	re, err := regexp.Compile(`\A(?s:` + body + `)\z`)
	if err != nil {
		return nil, wire.BadRequest(field, "the pattern can't be understood")
	}
	g := &glob{re: re, depth: strings.Count(pattern, "/") + 1}
	if strings.ContainsAny(pattern, `{\[`) || strings.Contains(pattern, "**") {
		g.depth = -1
	}
	parts := strings.Split(pattern, "/")
	for i, part := range parts[:len(parts)-1] {
		if strings.ContainsAny(part, `*?[]{}\`) || part == "" || part == "." || part == ".." {
			break
		}
		g.fixed = strings.Join(parts[:i+1], "/")
	}
	return g, nil
}

func (g *glob) match(rel string) bool { return g.re.MatchString(rel) }

// mayHold says whether something below the directory may match.
func (g *glob) mayHold(rel string, depth int) bool {
	if g.depth >= 0 && depth >= g.depth {
		return false
	}
	if g.fixed == "" || rel == "" {
		return true
	}
	return rel == g.fixed || strings.HasPrefix(rel, g.fixed+"/") || strings.HasPrefix(g.fixed, rel+"/")
}

type globParser struct {
	in     string
	at     int
	braces int
	out    strings.Builder
}

func (p *globParser) run() (string, bool) {
	for p.at < len(p.in) {
		c := p.in[p.at]
		p.at++
		switch c {
		case '*':
			p.star()
		case '?':
			p.out.WriteString(`[^/]`)
		case '[':
			if !p.class() {
				return "", false
			}
		case '{':
			p.braces++
			p.out.WriteString(`(?:`)
		case '}':
			if p.braces == 0 {
				p.out.WriteString(`\}`)
				continue
			}
			p.braces--
			p.out.WriteByte(')')
		case ',':
			if p.braces > 0 {
				p.out.WriteByte('|')
			} else {
				p.out.WriteByte(',')
			}
		case '\\':
			if p.at == len(p.in) {
				return "", false
			}
			p.literal()
		default:
			p.at--
			p.literal()
		}
	}
	return p.out.String(), p.braces == 0
}

// literal takes one byte or one whole character.
func (p *globParser) literal() {
	n := 1
	for p.at+n < len(p.in) && p.in[p.at]&0xc0 == 0xc0 && p.in[p.at+n]&0xc0 == 0x80 {
		n++
	}
	p.out.WriteString(regexp.QuoteMeta(strings.ToValidUTF8(p.in[p.at:p.at+n], "\uFFFD")))
	p.at += n
}

func (p *globParser) star() {
	begins := p.at == 1 || p.in[p.at-2] == '/'
	if p.at < len(p.in) && p.in[p.at] == '*' && begins {
		switch rest := p.in[p.at+1:]; {
		case rest == "":
			p.at++
			p.out.WriteString(`.*`)
			return
		case rest[0] == '/':
			p.at += 2
			p.out.WriteString(`(?:[^/]*/)*`)
			return
		}
	}
	for p.at < len(p.in) && p.in[p.at] == '*' {
		p.at++
	}
	p.out.WriteString(`[^/]*`)
}

// class is a set of characters, of which `/` is never one.
func (p *globParser) class() bool {
	end := p.at
	if end < len(p.in) && (p.in[end] == '!' || p.in[end] == '^') {
		end++
	}
	if end < len(p.in) && p.in[end] == ']' {
		end++
	}
	for end < len(p.in) && p.in[end] != ']' {
		end++
	}
	if end >= len(p.in) {
		return false
	}
	set := p.in[p.at:end]
	p.at = end + 1
	not := ""
	if set[0] == '!' || set[0] == '^' {
		not, set = "^/", set[1:]
	}
	set = strings.NewReplacer(`\`, `\\`, `[`, `\[`, `]`, `\]`, `^`, `\^`, `&`, `\&`, `~`, `\~`).Replace(set)
	if not == "" && set == "/" {
		return false
	}
	p.out.WriteString("[" + not + strings.ReplaceAll(set, "/", "") + "]")
	return true
}

// filter chooses files by patterns: one without a `/` is for the last component.
type filter struct{ include, exclude []*glob }

func newFilter(include, exclude []string) (f filter, err error) {
	if len(include) > maxPatterns || len(exclude) > maxPatterns {
		return f, wire.BadRequest("include", "want at most 100 patterns")
	}
	if f.include, err = anywhere("include", include); err == nil {
		f.exclude, err = anywhere("exclude", exclude)
	}
	return f, err
}

func anywhere(field string, patterns []string) ([]*glob, error) {
	var out []*glob
	for _, p := range patterns {
		if !strings.Contains(p, "/") && p != "" {
			p = "**/" + p
		}
		g, err := compileGlob(field, strings.TrimSuffix(p, "/"))
		if err != nil {
			return nil, err
		}
		out = append(out, g)
	}
	return out, nil
}

func (f *filter) excluded(rel string) bool { return anyMatch(f.exclude, rel) }

func (f *filter) included(rel string) bool {
	return len(f.include) == 0 || anyMatch(f.include, rel)
}

func anyMatch(globs []*glob, rel string) bool {
	for _, g := range globs {
		if g.match(rel) {
			return true
		}
	}
	return false
}
