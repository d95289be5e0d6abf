package files

import (
	"fmt"
	"net/http"
	"strings"
	"syscall"

	"cloche.dev/agent/internal/wire"
)

// tag names one state of a file: another content has another one. The time of
// the last change is in it, which nobody but the kernel sets.
func tag(st *syscall.Stat_t) string {
	return fmt.Sprintf("%x-%x-%x-%x-%x", st.Dev, st.Ino, st.Size, uint64(st.Mtim.Nano()), uint64(st.Ctim.Nano()))
}

// Conditions are what has to be true of a file for an upload to be done.
// Match: one of these tags, or "*" for any file. Absent: there is none.
type Conditions struct {
	Match  []string
	Absent bool
}

// Tags reads a list of tags, as they came from the host.
func Tags(s string) []string {
	if s == "" {
		return nil
	}
	return strings.Split(s, ",")
}

func matches(tags []string, st *syscall.Stat_t) bool {
	t := tag(st)
	for _, one := range tags {
		if one == "*" || one == t {
			return true
		}
	}
	return false
}

func changed(message string) error {
	return &wire.Error{Status: http.StatusPreconditionFailed, Code: "changed", Message: message, Field: "path"}
}

// check is made when an upload begins, so that it need not be sent in vain, and
// again when it is about to take its place.
func (c Conditions) check(exists bool, st *syscall.Stat_t) error {
	switch {
	case c.Absent && exists:
		return changed("there is a file already")
	case len(c.Match) > 0 && !exists:
		return changed("there is no file")
	case len(c.Match) > 0 && !matches(c.Match, st):
		return changed("the file has changed")
	}
	return nil
}

// Range is a part of a file. First < 0: the last Count bytes. Count < 0: up to the end.
type Range struct {
	First, Count int64
}

// within is the part as it is in a file of so many bytes, nil if it has none of it.
func (r *Range) within(size int64) *Range {
	if r.First < 0 {
		if r.Count <= 0 || size == 0 {
			return nil
		}
		n := min(r.Count, size)
		return &Range{size - n, n}
	}
	if r.First >= size {
		return nil
	}
	if r.Count < 0 || r.Count > size-r.First {
		return &Range{r.First, size - r.First}
	}
	return &Range{r.First, r.Count}
}
