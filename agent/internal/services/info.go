package services

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"cloche.dev/agent/internal/wire"
)

// Info describes a service.
type Info struct {
	Name      string   `json:"name"`
	State     string   `json:"state"`
	Detail    string   `json:"detail,omitempty"`
	Waiting   []string `json:"waiting_for,omitempty"`
	PID       int      `json:"pid"`
	Process   string   `json:"process_id,omitempty"` // of the present run, or the last
	StartedNS int64    `json:"started_ns"`
	Restarts  int      `json:"restarts"`
	Failures  int      `json:"failures"` // health checks in a row
	RetryMS   int64    `json:"retry_ms,omitempty"`
	LastExit  *Ended   `json:"last_exit,omitempty"`
	Log       LogInfo  `json:"log"`
	Spec      *Spec    `json:"spec"`
}

// Ended is how and when the last run that is over ended.
type Ended struct {
	*wire.Exit
	AtNS int64 `json:"at_ns"`
}

// LogInfo is what is kept of the output. Offsets of another epoch mean nothing.
type LogInfo struct {
	Epoch string `json:"epoch"`
	First uint64 `json:"first"`
	Next  uint64 `json:"next"`
}

// info describes a service. The lock is held.
func (s *service) info() Info {
	i := Info{
		Name: s.name, State: s.state, Detail: s.detail, Waiting: s.waiting, PID: s.pid, Process: s.process,
		StartedNS: s.started, Restarts: s.restarts, Failures: s.failures, Spec: s.spec,
	}
	if s.state == stateBackoff {
		i.RetryMS = max(0, time.Until(s.again).Milliseconds())
	}
	if s.last != nil {
		i.LastExit = &Ended{s.last, s.lastAt.UnixNano()}
	}
	i.Log.Epoch = s.epoch
	i.Log.First, i.Log.Next = s.log.Extent()
	return i
}

// List describes all services, by name.
func (m *Manager) List() []Info {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := []Info{}
	for _, name := range slices.Sorted(maps.Keys(m.all)) {
		out = append(out, m.all[name].info())
	}
	return out
}

// Get describes one.
func (m *Manager) Get(name string) (Info, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := m.all[name]
	if s == nil {
		return Info{}, notFound()
	}
	return s.info(), nil
}

// Wait is Get once the service is in one of the states, or after so long.
func (m *Manager) Wait(ctx context.Context, name string, states []string, limit time.Duration) (Info, error) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for {
		m.mu.Lock()
		s := m.all[name]
		if s == nil {
			m.mu.Unlock()
			return Info{}, notFound()
		}
		info, changed := s.info(), m.changes()
		m.mu.Unlock()
		if slices.Contains(states, info.State) {
			return info, nil
		}
		select {
		case <-changed:
		case <-timer.C:
			return info, nil
		case <-ctx.Done():
			return info, nil
		}
	}
}

// turns lets calls about one name take turns.
type turns struct {
	mu    sync.Mutex
	users map[string]*turn
}

type turn struct {
	token chan struct{}
	users int
}

func (t *turns) take(ctx context.Context, name string) (func(), error) {
	t.mu.Lock()
	u := t.users[name]
	if u == nil {
		u = &turn{token: make(chan struct{}, 1)}
		u.token <- struct{}{}
		t.users[name] = u
	}
	u.users++
	t.mu.Unlock()
	leave := func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if u.users--; u.users == 0 {
			delete(t.users, name)
		}
	}
	select {
	case <-u.token:
		return func() {
			u.token <- struct{}{}
			leave()
		}, nil
	case <-ctx.Done():
		leave()
		return nil, ctx.Err()
	}
}
