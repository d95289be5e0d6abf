package proc

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"cloche.dev/agent/internal/sys"
	"cloche.dev/agent/internal/users"
	"cloche.dev/agent/internal/wire"
)

// plan is a request made concrete.
type plan struct {
	id   *users.Identity
	path string // program; empty when there is none
	argv []string
	env  []string
	cwd  string
	// failure replaces the start of a program that does not exist.
	failure string
	rlimits []rlimit
	tools   bool
}

// maxTotal is the kernel's limit for all strings and the pointers to them
// together: a quarter of the usual stack limit.
const maxTotal = 2 << 20

func (m *Manager) plan(r *Request) (*plan, error) {
	id, err := m.Users.Resolve(r.User)
	if err != nil {
		return nil, err
	}
	p := &plan{id: id, argv: r.Argv, tools: r.Tools}
	if p.cwd, err = workDir(r.Cwd, id); err != nil {
		return nil, err
	}
	shell := loginShell(id)
	env := m.environment(r, id, p.cwd, shell)
	p.env = env.list()
	if r.Shell != nil || r.login() {
		if r.login() {
			p.argv = []string{"-" + filepath.Base(shell)}
		} else {
			p.argv = []string{shell, "-c", *r.Shell}
		}
		if shell == "" {
			p.failure = "the image has no shell"
		}
		p.path = shell
	} else {
		p.path, p.failure = lookPath(r.Argv[0], env.get("PATH"), p.cwd, id)
	}
	return p, p.checkTotal(r)
}

func (p *plan) checkTotal(r *Request) error {
	const pointer = 8
	args, env := 0, 0
	for _, a := range p.argv {
		args += len(a) + 1 + pointer
	}
	for _, e := range p.env {
		env += len(e) + 1 + pointer
	}
	if args+env < maxTotal-4096 {
		return nil
	}
	field := "argv"
	if env > args {
		field = "env"
	}
	return wire.TooLarge(field, "arguments and environment together are over the limit of 2 MiB")
}

// workDir checks an explicit directory with the user's own rights; a home that
// is unusable is silently replaced.
func workDir(cwd string, id *users.Identity) (string, error) {
	explicit := cwd != ""
	if !explicit {
		cwd = id.Home
		if cwd == "" || cwd[0] != '/' {
			return "/", nil
		}
	}
	err := sys.AsUser(id.UID, id.GID, id.Groups, func() error {
		var st syscall.Stat_t
		if err := syscall.Stat(cwd, &st); err != nil {
			return err
		}
		if st.Mode&syscall.S_IFMT != syscall.S_IFDIR {
			return syscall.ENOTDIR
		}
		if id.UID == 0 {
			return nil
		}
		return sys.Access(cwd, sys.XOK)
	})
	if err == nil {
		return cwd, nil
	}
	if !explicit {
		return "/", nil
	}
	return "", wire.FromErr(err, "cwd")
}

// loginShell is the user's own shell if it is one, or what the image has.
func loginShell(id *users.Identity) string {
	for _, s := range []string{id.Shell, "/bin/bash", "/bin/sh"} {
		switch filepath.Base(s) {
		case ".", "nologin", "false", "true", "sync":
			continue
		}
		if isProgram(s) {
			return s
		}
	}
	return ""
}

func isProgram(path string) bool {
	var st syscall.Stat_t
	return syscall.Stat(path, &st) == nil && st.Mode&syscall.S_IFMT == syscall.S_IFREG && st.Mode&0o111 != 0
}

// lookPath finds a program as execvp(3) does: the first one in PATH that the
// user may execute, or else the first that exists, so that the kernel says why not.
func lookPath(name, path, cwd string, id *users.Identity) (string, string) {
	if strings.Contains(name, "/") {
		return name, ""
	}
	second := ""
	for dir := range strings.SplitSeq(path, ":") {
		full := filepath.Join(dir, name)
		if !filepath.IsAbs(full) {
			full = filepath.Join(cwd, full)
		}
		var st syscall.Stat_t
		if syscall.Stat(full, &st) != nil || st.Mode&syscall.S_IFMT == syscall.S_IFDIR {
			continue
		}
		if mayExecute(&st, id) {
			return full, ""
		}
		if second == "" {
			second = full
		}
	}
	if second == "" {
		return "", "no such program in PATH"
	}
	return second, ""
}

func mayExecute(st *syscall.Stat_t, id *users.Identity) bool {
	switch {
	case id.UID == 0:
		return st.Mode&0o111 != 0
	case st.Uid == id.UID:
		return st.Mode&0o100 != 0
	case slices.Contains(id.Groups, st.Gid):
		return st.Mode&0o010 != 0
	}
	return st.Mode&0o001 != 0
}

// environ is an environment under construction; later settings win, and the
// order is that of the first.
type environ struct {
	keys   []string
	values map[string]string
}

func (e *environ) set(k, v string) {
	if _, ok := e.values[k]; !ok {
		e.keys = append(e.keys, k)
	}
	e.values[k] = v
}

func (e *environ) get(k string) string { return e.values[k] }

func (e *environ) list() []string {
	out := make([]string, len(e.keys))
	for i, k := range e.keys {
		out[i] = k + "=" + e.values[k]
	}
	return out
}

func (m *Manager) environment(r *Request, id *users.Identity, cwd, shell string) *environ {
	e := &environ{keys: make([]string, 0, 12+len(r.Env)), values: make(map[string]string, 12+len(r.Env))}
	home, sh := id.Home, id.Shell
	if home == "" {
		home = "/"
	}
	if sh == "" {
		sh = shell
	}
	e.set("PATH", users.DefaultPath)
	e.set("HOME", home)
	e.set("USER", id.Name)
	e.set("LOGNAME", id.Name)
	if sh != "" {
		e.set("SHELL", sh)
	}
	e.set("LANG", "C.UTF-8")
	e.set("PWD", cwd)
	if r.PTY != nil {
		e.set("TERM", "xterm-256color")
	}
	for _, kv := range m.Environment.Vars() {
		e.set(kv[0], kv[1])
	}
	for _, k := range slices.Sorted(maps.Keys(r.Env)) {
		e.set(k, r.Env[k])
	}
	return e
}

// devNull is every command's stdin that was given none, and where output goes
// that nobody wants.
func devNull() (in, out int, err error) {
	if in, err = syscall.Open(os.DevNull, syscall.O_RDONLY|syscall.O_CLOEXEC, 0); err != nil {
		return
	}
	out, err = syscall.Open(os.DevNull, syscall.O_WRONLY|syscall.O_CLOEXEC, 0)
	return
}
