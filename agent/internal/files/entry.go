package files

import (
	"encoding/base64"
	"fmt"
	"strings"
	"syscall"
	"unicode/utf8"

	"cloche.dev/agent/internal/users"
	"cloche.dev/agent/internal/wire"
)

// Entry describes one name in a directory.
type Entry struct {
	Name    string  `json:"name"`
	NameB64 string  `json:"name_b64,omitempty"`
	Path    string  `json:"path"`
	Type    string  `json:"type"`
	Size    int64   `json:"size"`
	Mode    string  `json:"mode"`
	MtimeNS int64   `json:"mtime_ns"`
	UID     uint32  `json:"uid"`
	GID     uint32  `json:"gid"`
	Owner   string  `json:"owner"`
	Group   string  `json:"group"`
	Target  *string `json:"target,omitempty"`
}

var typeNames = map[uint32]string{
	syscall.S_IFREG: "file", syscall.S_IFDIR: "dir", syscall.S_IFLNK: "symlink", syscall.S_IFIFO: "fifo",
	syscall.S_IFSOCK: "socket", syscall.S_IFBLK: "block", syscall.S_IFCHR: "char",
}

// B64 is base64url without padding, as raw names travel.
var B64 = base64.RawURLEncoding

// text makes a name fit for JSON.
func text(name string) string { return strings.ToValidUTF8(name, "\uFFFD") }

// unknown is an entry of which nothing but the name is known.
func unknown(name, path string) Entry {
	e := Entry{Name: text(name), Path: text(path), Type: "unknown", Mode: "0000"}
	if !utf8.ValidString(name) {
		e.NameB64 = B64.EncodeToString([]byte(name))
	}
	return e
}

func (f *FS) describe(name, path string, st *syscall.Stat_t) Entry {
	e := unknown(name, path)
	if t, ok := typeNames[kind(st.Mode)]; ok {
		e.Type = t
	}
	e.Size = st.Size
	e.Mode = fmt.Sprintf("%04o", st.Mode&0o7777)
	e.MtimeNS = st.Mtim.Nano()
	e.UID, e.GID = st.Uid, st.Gid
	e.Owner, e.Group = f.Users.UserName(st.Uid), f.Users.GroupName(st.Gid)
	if e.Type == "symlink" {
		if t, err := readlink(path); err == nil {
			t = text(t)
			e.Target = &t
		}
	}
	return e
}

func readlink(path string) (string, error) {
	var buf [syscall.PathMax]byte
	n, err := syscall.Readlink(path, buf[:])
	if err != nil {
		return "", err
	}
	return string(buf[:n]), nil
}

// Stat describes one path; follow looks through a link.
func (f *FS) Stat(id *users.Identity, path string, follow bool) (Entry, error) {
	var e Entry
	err := as(id, func() (err error) {
		e, err = f.stat(path, follow)
		return err
	})
	if err != nil {
		return e, wire.FromErr(err, "path")
	}
	return e, nil
}

func (f *FS) stat(path string, follow bool) (Entry, error) {
	var st syscall.Stat_t
	call := syscall.Lstat
	if follow {
		call = syscall.Stat
	}
	if err := call(path, &st); err != nil {
		return Entry{}, err
	}
	_, base := split(path)
	if base == "" {
		base = path
	}
	return f.describe(base, path, &st), nil
}

// exact is a path for JSON: as text, and as base64url if that is not exact.
func exact(path string) (string, string) {
	if utf8.ValidString(path) {
		return path, ""
	}
	return text(path), B64.EncodeToString([]byte(path))
}
