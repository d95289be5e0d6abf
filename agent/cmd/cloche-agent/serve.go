package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"cloche.dev/agent/internal/api"
	"cloche.dev/agent/internal/boot"
	"cloche.dev/agent/internal/cgroup"
	"cloche.dev/agent/internal/files"
	"cloche.dev/agent/internal/link"
	"cloche.dev/agent/internal/machine"
	"cloche.dev/agent/internal/proc"
	"cloche.dev/agent/internal/services"
	"cloche.dev/agent/internal/sys"
	"cloche.dev/agent/internal/users"
)

const (
	execCgroup = "/sys/fs/cgroup/exec"
	// servicesFile holds the services of the machine, for its next start.
	servicesFile = "/var/lib/cloche/services.json"
	portWait     = 30 * time.Second
	// endGrace is what services have to end when the agent is no machine's.
	endGrace = 5 * time.Second
	// softMemory is where the collector begins to work harder. Usually the
	// agent needs a third of it.
	softMemory = 24 << 20
)

// survived are signals that process 1 may not die of, whoever sends them: the
// machine would end with it. They are caught and not ignored, because commands
// would inherit the latter. Faults of the agent's own are not affected.
var survived = []os.Signal{
	syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGILL, syscall.SIGTRAP, syscall.SIGABRT,
	syscall.SIGBUS, syscall.SIGFPE, syscall.SIGUSR1, syscall.SIGSEGV, syscall.SIGUSR2, syscall.SIGPIPE,
	syscall.SIGALRM, syscall.SIGTERM, syscall.SIGSTKFLT, syscall.SIGXCPU, syscall.SIGXFSZ,
	syscall.SIGVTALRM, syscall.SIGIO, syscall.SIGPWR, syscall.SIGSYS,
}

// run is the life of process 1. It never returns: if the machine cannot be
// used, it is turned off, and the host sees that.
func run() {
	debug.SetMemoryLimit(softMemory)
	if err := boot.Root(); err != nil {
		boot.Log("cannot boot: %v", err)
		time.Sleep(time.Second)
		boot.PowerOff()
	}
	boot.Setup()
	boot.CalmMonitor()
	boot.Limits()
	_ = syscall.Setgroups([]int{0})
	signal.Notify(make(chan os.Signal, 1), survived...)
	groups, err := cgroup.New(execCgroup, machine.Limits())
	if err != nil {
		boot.Log("no cgroups: %v", err)
		groups = nil
	}
	server, _, err := assemble(groups, servicesFile, true, boot.Log)
	if err != nil {
		boot.Log("cannot start: %v", err)
		boot.PowerOff()
	}
	go func() { _ = server.Serve() }()
	for {
		boot.Log("port: %v", servePort(server))
		time.Sleep(100 * time.Millisecond)
	}
}

func servePort(s *link.Server) error {
	port, err := link.OpenPort(portWait)
	if err != nil {
		return err
	}
	defer port.Close()
	boot.Log("version %s serves on %s", machine.Version, link.PortName)
	return link.NewLink(port).Run(s)
}

// develop serves on a socket without touching the machine.
func develop(listen, root, state string) error {
	l, err := link.ListenUnix(listen)
	if err != nil {
		return err
	}
	boot.Limits()
	boot.CloseOnExec()
	syscall.Umask(0o022)
	if err := sys.Subreaper(); err != nil {
		return err
	}
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP, syscall.SIGPIPE)
	groups := developCgroup(root)
	kept := ""
	if state != "" {
		kept = filepath.Join(state, filepath.Base(servicesFile))
	}
	server, units, err := assemble(groups, kept, false, log.Printf)
	if err != nil {
		return err
	}
	units.Boot()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	go func() {
		<-ctx.Done()
		_ = l.Close()
	}()
	go func() { _ = server.Serve() }()
	err = server.ServeListener(l)
	over, cancel := context.WithTimeout(context.Background(), endGrace)
	defer cancel()
	units.End(over)
	if groups != nil {
		groups.Destroy()
	}
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// developCgroup finds a place for commands below the process's own cgroup.
func developCgroup(root string) *cgroup.Manager {
	if root == "none" {
		return nil
	}
	if root == "auto" {
		if root = findCgroup2(); root == "" {
			return nil
		}
		root = filepath.Join(root, fmt.Sprintf("cloche-dev-%d", os.Getpid()))
	}
	m, err := cgroup.New(root, cgroup.Limits{})
	if err != nil {
		_ = os.Remove(root)
		return nil
	}
	return m
}

func findCgroup2() string {
	b, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) > 3 && f[2] == "cgroup2" && strings.HasPrefix(f[3], "rw") {
			return f[1]
		}
	}
	return ""
}

// assemble puts the parts together.
func assemble(groups *cgroup.Manager, kept string, real bool, logf func(string, ...any)) (*link.Server, *services.Manager, error) {
	db := users.New("/etc/passwd", "/etc/group")
	reaper := proc.NewReaper()
	procs, err := proc.NewManager(&proc.Manager{
		Users:       db,
		Environment: &users.Environment{Path: "/etc/environment"},
		Reaper:      reaper,
		Cgroups:     groups,
	})
	if err != nil {
		return nil, nil, err
	}
	go reaper.Run(nil)
	units := services.New(&services.Manager{Procs: procs, Path: kept, Logf: logf})
	a := &api.API{
		Machine:  &machine.Machine{Real: real, Cgroups: groups, Warm: procs.Warm, Commands: procs, PowerOff: boot.PowerOff},
		Procs:    procs,
		Services: units,
		Files:    &files.FS{Users: db},
		Users:    db,
		Log:      logf,
	}
	return link.NewServer(a.Handler()), units, nil
}
