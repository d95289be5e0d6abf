package files

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io"
	"strings"
	"syscall"

	"cloche.dev/agent/internal/sys"
	"cloche.dev/agent/internal/users"
	"cloche.dev/agent/internal/wire"
)

// Put is an upload.
type Put struct {
	Path    string
	Mode    *uint32
	MtimeNS *int64
	Append  bool
	Parents bool
	If      Conditions
}

// Written is the answer to an upload.
type Written struct {
	Path    string `json:"path"`
	Bytes   int64  `json:"bytes"`
	Created bool   `json:"created"`
	Tag     string `json:"tag,omitempty"`
}

// target is the file that an upload is for, links resolved.
type target struct {
	path   string
	exists bool
	st     syscall.Stat_t
}

// maxLinks is the kernel's limit for links in one look-up.
const maxLinks = 40

// Write replaces a file, or appends to it.
func (f *FS) Write(id *users.Identity, p *Put, body io.Reader) (*Written, error) {
	var t *target
	var tmp *temporary
	err := as(id, func() (err error) {
		if t, err = findTarget(p, id); err != nil {
			return err
		}
		if p.Mode != nil && t.exists && id.UID != 0 && t.st.Uid != id.UID {
			return syscall.EPERM
		}
		if err := p.If.check(t.exists, &t.st); err != nil {
			return err
		}
		if p.Append {
			return nil
		}
		tmp, err = newTemporary(t.path)
		return err
	})
	if err != nil && t != nil && t.exists && inPlaceAnyway(err) {
		// The file may be written, but its directory may not.
		err, tmp = nil, nil
	}
	if err != nil {
		return nil, wire.FromErr(err, "path")
	}
	var n int64
	var now syscall.Stat_t
	if tmp == nil {
		n, err = f.writeInPlace(id, p, t, body, &now)
	} else {
		n, err = f.replace(tmp, id, p, t, body, &now)
	}
	if err != nil {
		return nil, wire.FromErr(err, "path")
	}
	return &Written{Path: text(p.Path), Bytes: n, Created: !t.exists, Tag: tag(&now)}, nil
}

func inPlaceAnyway(err error) bool {
	return errors.Is(err, syscall.EACCES) || errors.Is(err, syscall.EPERM) ||
		errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.EROFS)
}

// findTarget follows links in the last component, also one that leads to a
// file yet to be made, and checks what is there.
func findTarget(p *Put, id *users.Identity) (*target, error) {
	t := &target{path: p.Path}
	for range maxLinks {
		dir, base := split(t.path)
		if base == "" || t.path[len(t.path)-1] == '/' {
			return nil, wire.Conflict("is_directory", "path", "it is a directory")
		}
		switch err := syscall.Lstat(t.path, &t.st); {
		case err == syscall.ENOENT:
			if p.Parents {
				return t, makeParents(dir)
			}
			return t, nil
		case err != nil:
			return nil, err
		}
		if kind(t.st.Mode) == syscall.S_IFLNK {
			to, err := readlink(t.path)
			if err != nil {
				return nil, err
			}
			if t.path = to; to == "" || to[0] != '/' {
				t.path = join(dir, to)
			}
			continue
		}
		t.exists = true
		if err := regular(t.st.Mode); err != nil {
			return nil, err
		}
		return t, sys.Access(t.path, sys.WOK)
	}
	return nil, syscall.ELOOP
}

// temporary is a file beside the target that will take its place.
type temporary struct {
	dir  int // so that the name stays in the directory that was checked
	fd   int
	name string
	base string
}

const temporarySuffix = ".cloche-tmp"

// temporaryName is one that nobody has had before.
func temporaryName() string {
	var random [8]byte
	_, _ = rand.Read(random[:])
	return "." + hex.EncodeToString(random[:]) + temporarySuffix
}

// isTemporary says whether a name is one of ours.
func isTemporary(name string) bool {
	return len(name) == 1+16+len(temporarySuffix) && name[0] == '.' && strings.HasSuffix(name, temporarySuffix)
}

// newTemporary runs as the user.
func newTemporary(path string) (*temporary, error) {
	dir, base := split(path)
	if len(base) > 255 {
		return nil, syscall.ENAMETOOLONG
	}
	d, err := syscall.Open(dir, sys.OPath|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	t := &temporary{dir: d, base: base, name: temporaryName()}
	t.fd, err = syscall.Openat(d, t.name, syscall.O_WRONLY|syscall.O_CREAT|syscall.O_EXCL|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		_ = syscall.Close(d)
		return nil, err
	}
	return t, nil
}

// replace fills the temporary file and renames it. Whatever fails, it leaves
// the old file and nothing else.
func (f *FS) replace(t *temporary, id *users.Identity, p *Put, old *target, body io.Reader, now *syscall.Stat_t) (n int64, err error) {
	defer syscall.Close(t.dir)
	defer syscall.Close(t.fd)
	n, err = fill(t.fd, body)
	if err == nil {
		err = t.dress(id, p, old)
	}
	if err == nil {
		err = as(id, func() error { return f.settle(t, p) })
	}
	if err != nil {
		// Not as the user: the directory may be closed to them by now.
		_ = syscall.Unlinkat(t.dir, t.name)
		return n, err
	}
	return n, syscall.Fstat(t.fd, now)
}

// settle renames. Uploads come one after the other here, so that of two with the
// same condition one is refused.
func (f *FS) settle(t *temporary, p *Put) error {
	f.settling.Lock()
	defer f.settling.Unlock()
	if p.If.Absent {
		err := sys.RenameatNoReplace(t.dir, t.name, t.base)
		if err == syscall.EEXIST {
			return p.If.check(true, nil)
		}
		if err != syscall.EINVAL && err != syscall.ENOSYS {
			return err
		}
	}
	if p.If.Absent || len(p.If.Match) > 0 {
		var st syscall.Stat_t
		err := sys.Fstatat(t.dir, t.base, &st, sys.AtNoFollow)
		if err != nil && err != syscall.ENOENT {
			return err
		}
		if err := p.If.check(err == nil, &st); err != nil {
			return err
		}
	}
	return syscall.Renameat(t.dir, t.name, t.dir, t.base)
}

// dress gives the new file the owner, mode and time that it shall have.
func (t *temporary) dress(id *users.Identity, p *Put, old *target) error {
	mode := uint32(0o644)
	if old.exists {
		mode = old.st.Mode & 0o7777
		if id.UID != 0 {
			// As with any write by somebody who is not root.
			mode &^= syscall.S_ISUID | syscall.S_ISGID
		}
		if err := syscall.Fchown(t.fd, int(old.st.Uid), int(old.st.Gid)); err != nil {
			return err
		}
	}
	if p.Mode != nil {
		mode = *p.Mode
	}
	chmod := func() error { return syscall.Fchmod(t.fd, mode) }
	var err error
	if old.exists && old.st.Uid != id.UID {
		err = chmod()
	} else {
		// The kernel knows whether this user may set a special bit.
		err = as(id, chmod)
	}
	if err == nil && p.MtimeNS != nil {
		err = sys.SetTimes(t.fd, *p.MtimeNS)
	}
	return err
}
