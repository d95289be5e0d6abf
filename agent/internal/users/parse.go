// Package users looks up users and groups in the sandbox's own files. There
// is no NSS here: the agent is static and the image may be anything.
package users

import (
	"strconv"
	"strings"
)

type entry struct {
	name        string
	uid, gid    uint32
	home, shell string
}

type group struct {
	name    string
	gid     uint32
	members []string
}

// parsePasswd reads passwd(5). Lines that make no sense are left out.
func parsePasswd(text string) []entry {
	var out []entry
	for line := range strings.Lines(text) {
		f := strings.Split(strings.TrimRight(line, "\r\n"), ":")
		if len(f) < 7 || !usableName(f[0]) {
			continue
		}
		uid, ok1 := parseID(f[2])
		gid, ok2 := parseID(f[3])
		if ok1 && ok2 {
			out = append(out, entry{name: f[0], uid: uid, gid: gid, home: f[5], shell: f[6]})
		}
	}
	return out
}

// parseGroup reads group(5).
func parseGroup(text string) []group {
	var out []group
	for line := range strings.Lines(text) {
		f := strings.Split(strings.TrimRight(line, "\r\n"), ":")
		if len(f) < 4 || !usableName(f[0]) {
			continue
		}
		gid, ok := parseID(f[2])
		if !ok {
			continue
		}
		g := group{name: f[0], gid: gid}
		for m := range strings.SplitSeq(f[3], ",") {
			if m = strings.TrimSpace(m); m != "" {
				g.members = append(g.members, m)
			}
		}
		out = append(out, g)
	}
	return out
}

func usableName(s string) bool {
	return s != "" && s[0] != '#' && s[0] != '+' && s[0] != '-' && strings.IndexByte(s, 0) < 0
}

// parseID reads a user or group number. The highest one means "no change" to
// the kernel and is no id.
func parseID(s string) (uint32, bool) {
	if s == "" || len(s) > 10 {
		return 0, false
	}
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return 0, false
		}
	}
	n, err := strconv.ParseUint(s, 10, 32)
	return uint32(n), err == nil && n != 1<<32-1
}
