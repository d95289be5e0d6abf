package proc

import (
	"errors"
	"os"
	"runtime"
	"syscall"

	"cloche.dev/agent/internal/cgroup"
	"cloche.dev/agent/internal/sys"
	"cloche.dev/agent/internal/users"
	"cloche.dev/agent/internal/wire"
)

// pipes are the standard streams of a command: ours and the child's ends.
type pipes struct {
	stdin          *os.File // nil when all input fits into the pipe or there is none
	kept           *os.File // of an input that stays open
	tty            bool     // all three of them are one terminal, and stdout is our end of it
	stdout, stderr *os.File
	child          [3]int
	shared         bool // child[0] belongs to everybody
}

const (
	// pipeSize is what a new pipe holds.
	pipeSize = 64 << 10
	// widePipe is what those of a command hold that somebody is at, and
	// widestPipe those of a transfer of files: each time that one is full or
	// empty another process has its turn.
	widePipe   = 256 << 10
	widestPipe = 1 << 20
)

func (m *Manager) openPipes(r *Request, id *users.Identity) (*pipes, error) {
	p := &pipes{child: [3]int{-1, -1, -1}}
	var err error
	if r.PTY != nil {
		err = p.openTTY(*r.PTY, id.UID)
	} else {
		err = p.open(m.nullIn, r, id)
	}
	if err != nil {
		p.closeChild()
		p.closeOurs()
		return nil, err
	}
	return p, nil
}

// input is what can be written to while the command runs, if anything.
func (p *pipes) input(r *Request) *input {
	switch {
	case p.tty:
		return newInput(p.stdout, r.PTY)
	case p.kept != nil:
		return newInput(p.kept, nil)
	}
	return nil
}

func (p *pipes) open(null int, r *Request, id *users.Identity) (err error) {
	input, keep := r.Stdin, r.StdinMode == "pipe"
	// A program that is none of ours may care what its streams are.
	if r.Tools && r.Argv != nil && keep && !r.Detach {
		return p.openSockets(id)
	}
	if p.stdout, p.child[1], err = outPipe(id); err != nil {
		return err
	}
	if p.stderr, p.child[2], err = outPipe(id); err != nil {
		return err
	}
	if input == nil && !keep {
		p.child[0], p.shared = null, true
		return nil
	}
	fd := make([]int, 2)
	if err = syscall.Pipe2(fd, syscall.O_CLOEXEC); err != nil {
		return err
	}
	p.child[0] = fd[0]
	chown(fd[0], id)
	if keep {
		if !r.Detach {
			size := widePipe
			if r.Tools {
				size = widestPipe
			}
			sys.WidenPipe(fd[1], size)
			sys.WidenPipe(p.child[1], size)
		}
		p.kept, err = pollable(fd[1], "stdin")
		return err
	}
	if len(input) <= pipeSize {
		_, err = syscall.Write(fd[1], input)
		return errors.Join(err, syscall.Close(fd[1]))
	}
	p.stdin, err = pollable(fd[1], "stdin")
	return err
}

// openSockets is for what carries files: a pipe is slower, for its pages are
// counted one by one.
func (p *pipes) openSockets(id *users.Identity) (err error) {
	if p.kept, p.child[0], err = socketPair("stdin", true); err != nil {
		return err
	}
	if p.stdout, p.child[1], err = socketPair("output", false); err != nil {
		return err
	}
	p.stderr, p.child[2], err = outPipe(id)
	return err
}

// socketPair makes our end, which sends or receives, and the child's.
func socketPair(name string, sends bool) (*os.File, int, error) {
	fd, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, -1, err
	}
	ours, child := fd[0], fd[1]
	from, to := child, ours
	if sends {
		from, to = ours, child
	}
	sys.WidenSocket(from, widePipe)
	// Nothing goes the other way.
	_ = syscall.Shutdown(to, syscall.SHUT_WR)
	f, err := pollable(ours, name)
	if err != nil {
		_ = syscall.Close(child)
		return nil, -1, err
	}
	return f, child, nil
}

func outPipe(id *users.Identity) (*os.File, int, error) {
	fd := make([]int, 2)
	if err := syscall.Pipe2(fd, syscall.O_CLOEXEC); err != nil {
		return nil, -1, err
	}
	chown(fd[1], id)
	f, err := pollable(fd[0], "output")
	return f, fd[1], err
}

// chown lets the user open /dev/stdout and its like, which lead to the pipe.
func chown(fd int, id *users.Identity) {
	if id.UID != 0 {
		_ = syscall.Fchown(fd, int(id.UID), int(id.GID))
	}
}

// pollable makes our end of a new pipe wait in the runtime's poller. The only
// other status flag of a pipe is its direction, which can't be changed.
func pollable(fd int, name string) (*os.File, error) {
	if err := sys.SetNonblock(fd); err != nil {
		_ = syscall.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

func (p *pipes) closeChild() {
	for i, fd := range p.child {
		if fd >= 0 && !(i == 0 && p.shared) && !(i > 0 && p.tty) {
			_ = syscall.Close(fd)
		}
		p.child[i] = -1
	}
}

func (p *pipes) closeOurs() {
	for _, f := range []*os.File{p.stdin, p.kept, p.stdout, p.stderr} {
		if f != nil {
			_ = f.Close()
		}
	}
}

// fork starts the planned program. An error that concerns the program and not
// the machine comes back as text for the exit event, with its exit code.
func (m *Manager) fork(p *plan, std *pipes, cg *cgroup.Group) (int, <-chan Ended, error) {
	attr := &syscall.ProcAttr{
		Dir:   p.cwd,
		Env:   p.env,
		Files: []uintptr{uintptr(std.child[0]), uintptr(std.child[1]), uintptr(std.child[2])},
		Sys:   &syscall.SysProcAttr{Setsid: true, Setctty: std.tty, Ptrace: len(p.rlimits) > 0},
	}
	if !p.id.Root() || len(p.id.Groups) > 1 {
		attr.Sys.Credential = &syscall.Credential{Uid: p.id.UID, Gid: p.id.GID, Groups: p.id.Groups}
	}
	if p.tools {
		attr.Files = append(attr.Files, uintptr(m.self))
	}
	if cg != nil {
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, cg.FD()
	}
	return m.Reaper.Start(func() (int, error) {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		sys.SetSlack(sys.UsualSlack)
		if p.tools {
			sys.SetSlack(sys.MonitorSlack) // they have such a thread, and no timers
			defer sys.SetSlack(sys.UsualSlack)
		}
		pid, err := syscall.ForkExec(p.path, p.argv, attr)
		if err == nil && attr.Sys.Ptrace {
			err = limit(pid, p.rlimits)
		}
		return pid, err
	})
}

// limit gives a new process its limits before its first instruction: it is
// traced by this thread, and stands still after its exec.
func limit(pid int, limits []rlimit) error {
	var status syscall.WaitStatus
	got, err := syscall.Wait4(pid, &status, syscall.WALL, nil)
	for err == syscall.EINTR {
		got, err = syscall.Wait4(pid, &status, syscall.WALL, nil)
	}
	if err != nil || got != pid || !status.Stopped() {
		return syscall.EAGAIN // somebody has killed it already
	}
	for _, l := range limits {
		err = errors.Join(err, sys.Prlimit(pid, l.resource, &l.value))
	}
	if err == nil {
		err = syscall.PtraceDetach(pid)
	}
	if err != nil {
		_ = syscall.Kill(pid, syscall.SIGKILL)
		_, _ = syscall.Wait4(pid, &status, syscall.WALL, nil)
		return syscall.EAGAIN
	}
	return nil
}

// startFailure sorts the errors of fork: an answer of its own for those that
// the caller can do something about, else an exit code and a sentence.
func startFailure(err error, path string, r *Request) (code int, detail string, answer error) {
	var no syscall.Errno
	if !errors.As(err, &no) {
		return 0, "", wire.FromErr(err, "")
	}
	switch no {
	case syscall.EAGAIN, syscall.ENOMEM, syscall.EMFILE, syscall.ENFILE:
		return 0, "", wire.FromErr(no, "")
	case syscall.E2BIG:
		field := "argv"
		if r.Shell != nil {
			field = "shell"
		}
		return 0, "", wire.FromErr(no, field)
	case syscall.ENOENT, syscall.ENOTDIR:
		if _, serr := os.Stat(path); serr == nil {
			return 127, path + ": its interpreter or loader does not exist", nil
		}
		return 127, path + ": no such file", nil
	case syscall.ENOEXEC:
		return 126, path + ": not an executable format", nil
	case syscall.EISDIR:
		return 126, path + ": is a directory", nil
	}
	return 126, path + ": cannot be executed: " + no.Error(), nil
}
