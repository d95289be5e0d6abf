package sftp

import (
	"fmt"
	"os"
	"os/user"
	"strconv"
	"syscall"
	"time"

	"cloche.dev/agent/internal/sys"
)

// second is one in nanoseconds.
const second = int64(time.Second)

// attrs are those of a file, or those that are to be set.
type attrs struct {
	flags        uint32
	size         uint64
	uid, gid     uint32
	mode         uint32
	atime, mtime uint32
}

func (p *in) attrs() attrs {
	a := attrs{flags: p.u32()}
	if a.flags&attrSize != 0 {
		a.size = p.u64()
	}
	if a.flags&attrOwner != 0 {
		a.uid, a.gid = p.u32(), p.u32()
	}
	if a.flags&attrMode != 0 {
		a.mode = p.u32()
	}
	if a.flags&attrTimes != 0 {
		a.atime, a.mtime = p.u32(), p.u32()
	}
	if a.flags&attrExtended != 0 {
		for range min(p.u32(), 1024) {
			p.bytes()
			p.bytes()
		}
	}
	return a
}

func (p *out) stat(st *syscall.Stat_t) *out {
	p.u32(attrSize | attrOwner | attrMode | attrTimes)
	p.u64(uint64(st.Size)).u32(st.Uid).u32(st.Gid).u32(st.Mode)
	return p.u32(seconds(st.Atim)).u32(seconds(st.Mtim))
}

// seconds fit into 32 bits in this version of the protocol.
func seconds(t syscall.Timespec) uint32 {
	return uint32(max(0, min(t.Sec, 1<<32-1)))
}

// apply sets what is asked for, in the order in which one does not undo another.
// A link itself is meant with nofollow, whose mode and size can't be set.
func (a *attrs) apply(path string, nofollow bool) error {
	if nofollow && a.flags&(attrSize|attrMode) != 0 {
		var st syscall.Stat_t
		if err := syscall.Lstat(path, &st); err != nil {
			return err
		}
		if st.Mode&syscall.S_IFMT == syscall.S_IFLNK {
			return syscall.ENOTSUP
		}
	}
	if a.flags&attrSize != 0 {
		if err := syscall.Truncate(path, int64(a.size)); err != nil {
			return err
		}
	}
	if a.flags&attrOwner != 0 {
		chown := syscall.Chown
		if nofollow {
			chown = syscall.Lchown
		}
		if err := chown(path, int(a.uid), int(a.gid)); err != nil {
			return err
		}
	}
	if a.flags&attrMode != 0 {
		if err := syscall.Chmod(path, a.mode&0o7777); err != nil {
			return err
		}
	}
	if a.flags&attrTimes != 0 {
		return sys.Utimes(path, int64(a.atime)*second, int64(a.mtime)*second, !nofollow)
	}
	return nil
}

func (a *attrs) applyTo(fd int) error {
	if a.flags&attrSize != 0 {
		if err := syscall.Ftruncate(fd, int64(a.size)); err != nil {
			return err
		}
	}
	if a.flags&attrOwner != 0 {
		if err := syscall.Fchown(fd, int(a.uid), int(a.gid)); err != nil {
			return err
		}
	}
	if a.flags&attrMode != 0 {
		if err := syscall.Fchmod(fd, a.mode&0o7777); err != nil {
			return err
		}
	}
	if a.flags&attrTimes != 0 {
		return sys.Utimes(sys.ProcFD(fd), int64(a.atime)*second, int64(a.mtime)*second, true)
	}
	return nil
}

// names remembers the names of users and groups.
type names struct{ users, groups map[uint32]string }

func (n *names) user(id uint32) string {
	return lookup(n.users, id, func(s string) (string, error) {
		u, err := user.LookupId(s)
		if err != nil {
			return "", err
		}
		return u.Username, nil
	})
}

func (n *names) group(id uint32) string {
	return lookup(n.groups, id, func(s string) (string, error) {
		g, err := user.LookupGroupId(s)
		if err != nil {
			return "", err
		}
		return g.Name, nil
	})
}

func lookup(known map[uint32]string, id uint32, find func(string) (string, error)) string {
	name, ok := known[id]
	if !ok {
		text := strconv.FormatUint(uint64(id), 10)
		var err error
		if name, err = find(text); err != nil {
			name = text
		}
		if len(known) < 4096 {
			known[id] = name
		}
	}
	return name
}

// long is a line as `ls -l` shows it, which clients show to people.
func (n *names) long(name string, st *syscall.Stat_t) string {
	when := time.Unix(st.Mtim.Sec, 0)
	format := "Jan _2 15:04"
	if d := time.Since(when); d < 0 || d > 182*24*time.Hour {
		format = "Jan _2  2006"
	}
	return fmt.Sprintf("%s %4d %-8s %-8s %8d %s %s", letters(st.Mode), st.Nlink,
		n.user(st.Uid), n.group(st.Gid), st.Size, when.Format(format), name)
}

func letters(mode uint32) string {
	kinds := map[uint32]byte{
		syscall.S_IFDIR: 'd', syscall.S_IFLNK: 'l', syscall.S_IFIFO: 'p', syscall.S_IFSOCK: 's',
		syscall.S_IFBLK: 'b', syscall.S_IFCHR: 'c',
	}
	b := []byte("-rwxrwxrwx")
	if k, ok := kinds[mode&syscall.S_IFMT]; ok {
		b[0] = k
	}
	for i := range 9 {
		if mode&(1<<(8-i)) == 0 {
			b[i+1] = '-'
		}
	}
	for i, bit := range []uint32{syscall.S_ISUID, syscall.S_ISGID, syscall.S_ISVTX} {
		if mode&bit == 0 {
			continue
		}
		at, lower := 3*(i+1), byte('s')
		if i == 2 {
			lower = 't'
		}
		if b[at] == '-' {
			lower -= 'a' - 'A'
		}
		b[at] = lower
	}
	return string(b)
}

// home is where paths that are not absolute begin.
func home() {
	if dir := os.Getenv("HOME"); dir != "" {
		_ = os.Chdir(dir)
	}
}
