package services

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"cloche.dev/agent/internal/proc"
	"cloche.dev/agent/internal/wire"
)

// States of a service.
const (
	stateStarting  = "starting"
	stateHealthy   = "healthy"
	stateUnhealthy = "unhealthy"
	stateBackoff   = "backoff"
	stateStopped   = "stopped"
	stateFailed    = "failed"
)

// Manager knows all services.
type Manager struct {
	Procs *proc.Manager
	// Path is where the definitions are kept; "" keeps them in memory only.
	Path string
	// Logf tells what is wrong with what was kept.
	Logf func(format string, args ...any)

	booted sync.Once
	turns  turns
	// edit is held from the look at the definitions to their being written.
	edit sync.Mutex

	mu      sync.Mutex
	all     map[string]*service
	changed chan struct{} // closed at the next change; nil: nobody waits
	halting bool
	history history
	ending  int // services that are forgotten, and have not ended yet
}

// service is one of them. The manager's lock guards what changes.
type service struct {
	name  string
	epoch string // of its log
	log   *proc.Log

	spec *Spec
	run  *running // nil: it is at rest

	state    string
	detail   string
	waiting  []string
	pid      int
	process  string
	started  int64
	restarts int
	failures int
	again    time.Time // when it is started again, in back-off
	last     *wire.Exit
	lastAt   time.Time
}

// running is a service that is being kept alive.
type running struct {
	spec *Spec
	stop context.CancelFunc
	kick chan struct{}
	done chan struct{}
}

// New completes m, whose exported fields are set.
func New(m *Manager) *Manager {
	m.all = map[string]*service{}
	m.turns.users = map[string]*turn{}
	m.history.begin()
	return m
}

func itoa(n int) string { return strconv.Itoa(n) }

func notFound() error { return wire.NotFound("name", "no such service") }

// set changes a service and tells those who wait.
func (m *Manager) set(_ *service, change func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change()
	m.tell()
}

func (m *Manager) tell() {
	if m.changed != nil {
		close(m.changed)
		m.changed = nil
	}
}

// changes gives a channel that is closed at the next change. The lock is held.
func (m *Manager) changes() <-chan struct{} {
	if m.changed == nil {
		m.changed = make(chan struct{})
	}
	return m.changed
}

// missing are the dependencies that are not there yet. The lock is held.
func (m *Manager) missing(spec *Spec) []string {
	var out []string
	for _, name := range spec.DependsOn {
		d := m.all[name]
		done := d != nil && d.state == stateStopped && d.run == nil && d.last != nil && d.last.ExitCode == 0
		if d == nil || d.state != stateHealthy && !done {
			out = append(out, name)
		}
	}
	return out
}

func (m *Manager) halted() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.halting
}

// Halt is for the end of the machine: what ends from now on is not started again.
func (m *Manager) Halt() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.halting = true
}

// End stops all services, in no order.
func (m *Manager) End(ctx context.Context) {
	m.Halt()
	m.mu.Lock()
	all := slices.Collect(maps.Values(m.all))
	m.mu.Unlock()
	var ending sync.WaitGroup
	for _, s := range all {
		ending.Go(func() { _ = m.end(ctx, s) })
	}
	ending.Wait()
}

// Boot starts what was kept for a start of the machine, the first time it is
// called.
func (m *Manager) Boot() {
	m.booted.Do(func() {
		m.edit.Lock()
		defer m.edit.Unlock()
		m.mu.Lock()
		defer m.mu.Unlock()
		specs := m.load()
		for _, spec := range specs {
			if m.all[spec.Name] == nil {
				m.all[spec.Name] = m.newService(spec)
			}
		}
		for _, spec := range specs {
			if *spec.Autostart {
				m.begin(spec.Name)
			}
		}
	})
}

func (m *Manager) newService(spec *Spec) *service {
	var b [8]byte
	_, _ = rand.Read(b[:])
	return &service{
		name: spec.Name, spec: spec, state: stateStopped,
		epoch: hex.EncodeToString(b[:]), log: m.Procs.NewLog(spec.LogBytes),
	}
}

// begin has a service and what it depends on kept alive. The lock is held.
func (m *Manager) begin(name string) {
	s := m.all[name]
	if s == nil || m.halting {
		return
	}
	for _, d := range s.spec.DependsOn {
		if t := m.all[d]; t != nil && t.run == nil && !(t.state == stateStopped && t.last != nil && t.last.ExitCode == 0) {
			m.begin(d) // there are no circles
		}
	}
	if s.run != nil {
		select {
		case s.run.kick <- struct{}{}:
		default:
		}
		return
	}
	ctx, stop := context.WithCancel(context.Background())
	s.run = &running{spec: s.spec, stop: stop, kick: make(chan struct{}, 1), done: make(chan struct{})}
	s.state, s.detail, s.restarts, s.failures = stateStarting, "", 0, 0
	m.tell()
	go m.supervise(ctx, s, s.run)
}

// end stops a service and waits for that.
func (m *Manager) end(ctx context.Context, s *service) error {
	m.mu.Lock()
	r := s.run
	if r == nil {
		s.state, s.detail = stateStopped, ""
		m.tell()
	}
	m.mu.Unlock()
	if r == nil {
		return nil
	}
	r.stop()
	select {
	case <-r.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Put defines a service, or defines it anew: then it is stopped first if it
// runs. The same definition changes nothing. True: it is a new one.
func (m *Manager) Put(ctx context.Context, spec *Spec) (bool, error) {
	release, err := m.turns.take(ctx, spec.Name)
	if err != nil {
		return false, err
	}
	defer release()
	ctx = context.WithoutCancel(ctx) // what was begun is done, whether or not anybody waits for it
	s, created, changed, err := m.define(spec)
	if err != nil || !created && !changed {
		return created, err
	}
	if changed {
		m.mu.Lock()
		runs := s.run != nil
		m.mu.Unlock()
		if runs {
			if err := m.end(ctx, s); err != nil {
				return false, err
			}
		}
		s.log.Resize(spec.LogBytes)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if *spec.Autostart {
		m.begin(spec.Name)
	}
	return created, nil
}

func (m *Manager) define(spec *Spec) (s *service, created, changed bool, err error) {
	m.edit.Lock()
	defer m.edit.Unlock()
	m.mu.Lock()
	s = m.all[spec.Name]
	if s != nil && s.spec.same(spec) {
		m.mu.Unlock()
		return s, false, false, nil
	}
	specs := m.specs(spec.Name)
	m.mu.Unlock()
	if len(specs) >= maxServices {
		return nil, false, false, wire.Conflict("conflict", "services", "there are as many services as there may be")
	}
	if err := ordered(specs, spec); err != nil {
		return nil, false, false, err
	}
	if err := m.save(append(specs, spec)); err != nil {
		return nil, false, false, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if s == nil {
		s, created = m.newService(spec), true
		m.all[spec.Name] = s
	} else {
		s.spec, changed = spec, true
	}
	m.tell()
	return s, created, changed, nil
}

// specs are all definitions but one, by name. The lock is held.
func (m *Manager) specs(without string) []*Spec {
	out := []*Spec{}
	for _, name := range slices.Sorted(maps.Keys(m.all)) {
		if name != without {
			out = append(out, m.all[name].spec)
		}
	}
	return out
}

// ordered says whether one may be added to the others: it depends on services
// that are there, and none depends on itself.
func ordered(others []*Spec, spec *Spec) error {
	needs := map[string][]string{spec.Name: spec.DependsOn}
	for _, o := range others {
		needs[o.Name] = o.DependsOn
	}
	for _, d := range spec.DependsOn {
		if _, ok := needs[d]; !ok {
			return wire.NotFound("depends_on", "it depends on a service that there is not")
		}
	}
	seen := map[string]bool{}
	open := slices.Clone(spec.DependsOn)
	for len(open) > 0 {
		name := open[0]
		open = open[1:]
		if name == spec.Name {
			return wire.Conflict("conflict", "depends_on", "it would depend on itself")
		}
		if !seen[name] {
			seen[name] = true
			open = append(open, needs[name]...)
		}
	}
	return nil
}

// Remove stops a service and forgets it. Another one must not depend on it.
func (m *Manager) Remove(ctx context.Context, name string) error {
	release, s, err := m.claim(ctx, name)
	if err != nil {
		return err
	}
	defer release()
	if err := m.forget(name); err != nil {
		return err
	}
	err = m.end(context.WithoutCancel(ctx), s)
	s.log.Close()
	m.set(s, func() { m.ending-- })
	return err
}

func (m *Manager) forget(name string) error {
	m.edit.Lock()
	defer m.edit.Unlock()
	m.mu.Lock()
	specs := m.specs(name)
	m.mu.Unlock()
	for _, o := range specs {
		if slices.Contains(o.DependsOn, name) {
			return wire.Conflict("conflict", "name", "another service depends on it")
		}
	}
	if err := m.save(specs); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.all, name)
	m.ending++
	m.tell()
	return nil
}

// claim waits for the turn at a service.
func (m *Manager) claim(ctx context.Context, name string) (func(), *service, error) {
	release, err := m.turns.take(ctx, name)
	if err != nil {
		return nil, nil, err
	}
	m.mu.Lock()
	s := m.all[name]
	m.mu.Unlock()
	if s == nil {
		release()
		return nil, nil, notFound()
	}
	return release, s, nil
}

// Do is "start", "stop" or "restart". A stop has ended when this returns.
func (m *Manager) Do(ctx context.Context, name, what string) error {
	release, s, err := m.claim(ctx, name)
	if err != nil {
		return err
	}
	defer release()
	ctx = context.WithoutCancel(ctx)
	if what != "start" {
		if err := m.end(ctx, s); err != nil {
			return err
		}
	}
	if what != "stop" {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.begin(name)
	}
	return nil
}

// Output streams the log of a service.
func (m *Manager) Output(ctx context.Context, w http.ResponseWriter, name string, stream byte, from uint64) error {
	m.mu.Lock()
	s := m.all[name]
	m.mu.Unlock()
	if s == nil {
		return notFound()
	}
	return s.log.Follow(ctx, w, stream, from)
}
