package users

import (
	"strings"
	"sync"
)

// DefaultPath is the PATH of a command that is given none.
const DefaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Environment reads /etc/environment and remembers it until it changes.
type Environment struct {
	Path string

	mu   sync.Mutex
	tag  tag
	vars [][2]string
}

// Vars gives the assignments in their order. The result must not be changed.
func (e *Environment) Vars() [][2]string {
	e.mu.Lock()
	defer e.mu.Unlock()
	if t := tagOf(e.Path); t != e.tag {
		e.tag = t
		e.vars = parseEnvironment(readSome(e.Path))
	}
	return e.vars
}

// parseEnvironment reads KEY=value lines. A word export before and a pair of
// quotes around the value are dropped; nothing is expanded.
func parseEnvironment(text string) [][2]string {
	var out [][2]string
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		line = strings.TrimPrefix(line, "export ")
		key, value, ok := strings.Cut(line, "=")
		key = strings.TrimSpace(key)
		if !ok || key == "" || key[0] == '#' || strings.ContainsAny(key, " \t\x00") || strings.IndexByte(value, 0) >= 0 {
			continue
		}
		if n := len(value); n >= 2 && (value[0] == '"' || value[0] == '\'') && value[n-1] == value[0] {
			value = value[1 : n-1]
		}
		out = append(out, [2]string{key, value})
	}
	return out
}
