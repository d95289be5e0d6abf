// Package files works on the sandbox's files on behalf of one of its users.
// The kernel decides what the user may do: each call runs with the user's
// file-system identity, and there are no checks of our own before it.
package files

import (
	"strings"
	"sync"
	"syscall"

	"cloche.dev/agent/internal/sys"
	"cloche.dev/agent/internal/users"
	"cloche.dev/agent/internal/wire"
)

// FS does the calls of §4 of the protocol.
type FS struct {
	Users *users.DB

	settling sync.Mutex
}

// as runs fn as the user.
func as(id *users.Identity, fn func() error) error {
	return sys.AsUser(id.UID, id.GID, id.Groups, fn)
}

// CheckPath refuses what can't be a path; the rest is up to the kernel.
func CheckPath(field, path string) error {
	if path == "" || path[0] != '/' {
		return wire.BadRequest(field, "want an absolute path")
	}
	if strings.IndexByte(path, 0) >= 0 {
		return wire.BadRequest(field, "contains NUL")
	}
	return nil
}

// split divides a path into its directory and its last component, which is
// empty for "/" and for what ends in a dot component.
func split(path string) (dir, base string) {
	trimmed := strings.TrimRight(path, "/")
	i := strings.LastIndexByte(trimmed, '/')
	if i < 0 {
		return "/", ""
	}
	dir, base = trimmed[:i+1], trimmed[i+1:]
	if len(dir) > 1 {
		dir = strings.TrimRight(dir, "/")
		if dir == "" {
			dir = "/"
		}
	}
	if base == "." || base == ".." {
		return trimmed, ""
	}
	return dir, base
}

// join is the reverse of split. It does not clean: "a/.." may be anywhere when
// a is a link.
func join(dir, base string) string {
	if strings.HasSuffix(dir, "/") {
		return dir + base
	}
	return dir + "/" + base
}

func kind(mode uint32) uint32 { return mode & syscall.S_IFMT }

// regular refuses what is not a regular file.
func regular(mode uint32) error {
	switch kind(mode) {
	case syscall.S_IFREG:
		return nil
	case syscall.S_IFDIR:
		return wire.Conflict("is_directory", "path", "it is a directory")
	}
	return wire.Conflict("not_a_regular_file", "path", "it is not a regular file")
}
