package users

import (
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"cloche.dev/agent/internal/wire"
)

// Identity is everything that a process gets from its user.
type Identity struct {
	UID, GID uint32
	Groups   []uint32 // for setgroups(2), the primary group included
	Name     string   // the number when there is no entry
	Home     string
	Shell    string // empty when there is no entry
}

// Root says whether file operations need no change of identity.
func (id *Identity) Root() bool { return id.UID == 0 && id.GID == 0 }

// maxFile bounds what is read from passwd and group.
const maxFile = 4 << 20

// DB answers look-ups. It parses a file again only when it has changed.
type DB struct {
	mu         sync.Mutex
	passwdPath string
	groupPath  string
	passwdTag  tag
	groupTag   tag
	passwd     []entry
	groups     []group
	names      map[uint32]string
	groupNames map[uint32]string
	resolved   map[string]*Identity
}

// tag identifies one state of a file.
type tag struct {
	dev, ino  uint64
	size      int64
	mtime     syscall.Timespec
	ctime     syscall.Timespec
	isPresent bool
}

// New makes a DB of the two files, usually /etc/passwd and /etc/group.
func New(passwd, group string) *DB {
	return &DB{passwdPath: passwd, groupPath: group}
}

// Resolve understands NAME, UID, NAME:GROUP and UID:GID, and any mixture. An
// empty text means root.
func (d *DB) Resolve(spec string) (*Identity, error) {
	if spec == "" {
		spec = "root"
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.refresh()
	if id := d.resolved[spec]; id != nil {
		return id, nil
	}
	id, err := d.resolve(spec)
	if err != nil {
		return nil, err
	}
	if len(d.resolved) < 64 {
		d.resolved[spec] = id
	}
	return id, nil
}

func (d *DB) resolve(spec string) (*Identity, error) {
	userPart, groupPart, hasGroup := strings.Cut(spec, ":")
	id, err := d.user(userPart)
	if err != nil {
		return nil, err
	}
	if hasGroup {
		if id.GID, err = d.group(groupPart); err != nil {
			return nil, err
		}
	}
	id.Groups = []uint32{id.GID}
	for _, g := range d.groups {
		if g.gid != id.GID && slices.Contains(g.members, id.Name) && !slices.Contains(id.Groups, g.gid) {
			id.Groups = append(id.Groups, g.gid)
		}
	}
	return id, nil
}

func (d *DB) user(s string) (*Identity, error) {
	uid, numeric := parseID(s)
	for i := range d.passwd {
		e := &d.passwd[i]
		if e.name == s || numeric && e.uid == uid {
			return &Identity{UID: e.uid, GID: e.gid, Name: e.name, Home: e.home, Shell: e.shell}, nil
		}
	}
	switch {
	case s == "root" || numeric && uid == 0:
		// An image without passwd still has its root.
		return &Identity{Name: "root", Home: "/root"}, nil
	case numeric:
		return &Identity{UID: uid, Name: s, Home: "/"}, nil
	}
	return nil, wire.NotFound("user", "no such user")
}

func (d *DB) group(s string) (uint32, error) {
	for i := range d.groups {
		if d.groups[i].name == s {
			return d.groups[i].gid, nil
		}
	}
	if gid, ok := parseID(s); ok {
		return gid, nil
	}
	return 0, wire.NotFound("user", "no such group")
}

// UserName and GroupName give the name of an id, or its number.
func (d *DB) UserName(uid uint32) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return nameOr(d.names, uid)
}

// GroupName is UserName for groups.
func (d *DB) GroupName(gid uint32) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return nameOr(d.groupNames, gid)
}

func nameOr(m map[uint32]string, id uint32) string {
	if s, ok := m[id]; ok {
		return s
	}
	return strconv.FormatUint(uint64(id), 10)
}

func (d *DB) refresh() {
	p, g := tagOf(d.passwdPath), tagOf(d.groupPath)
	if d.resolved != nil && p == d.passwdTag && g == d.groupTag {
		return
	}
	d.passwdTag, d.groupTag = p, g
	d.passwd = parsePasswd(readSome(d.passwdPath))
	d.groups = parseGroup(readSome(d.groupPath))
	d.resolved = map[string]*Identity{}
	d.names = make(map[uint32]string, len(d.passwd))
	for _, e := range slices.Backward(d.passwd) {
		d.names[e.uid] = e.name
	}
	d.groupNames = make(map[uint32]string, len(d.groups))
	for _, e := range slices.Backward(d.groups) {
		d.groupNames[e.gid] = e.name
	}
}

func tagOf(path string) tag {
	var st syscall.Stat_t
	if syscall.Stat(path, &st) != nil {
		return tag{}
	}
	return tag{dev: st.Dev, ino: st.Ino, size: st.Size, mtime: st.Mtim, ctime: st.Ctim, isPresent: true}
}

// readSome reads a file that user code may have put anything into: only a
// regular file, and not without end.
func readSome(path string) string {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return ""
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil || !st.Mode().IsRegular() || st.Size() > maxFile {
		return ""
	}
	b := make([]byte, st.Size())
	n, _ := f.ReadAt(b, 0)
	return string(b[:n])
}
