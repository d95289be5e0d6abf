package machine

import (
	"context"
	"errors"
	"reflect"
	"sync"
	"testing"
	"time"

	"cloche.dev/agent/internal/wire"
)

// crew writes down what it is told.
type crew struct {
	mu    sync.Mutex
	log   []string
	fails error
	slow  time.Duration
}

func (c *crew) say(s string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.log = append(c.log, s)
}

func (c *crew) said() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]string{}, c.log...)
}

func (c *crew) Freeze(time.Duration) error {
	time.Sleep(c.slow)
	c.say("freeze")
	return c.fails
}

func (c *crew) Thaw(keep bool) error {
	if keep {
		c.say("keep")
	} else {
		c.say("cancel")
	}
	return nil
}

func status(err error) int {
	var e *wire.Error
	if errors.As(err, &e) {
		return e.Status
	}
	return 0
}

func TestFreezeAndThaw(t *testing.T) {
	c := &crew{}
	m := &Machine{Commands: c}
	ctx := context.Background()
	long := &Freeze{TimeoutMS: 60_000, Disk: true}
	if err := m.Thaw(true); err != nil {
		t.Error(err)
	}
	if _, err := m.Freeze(ctx, long); err != nil {
		t.Error(err)
	}
	if _, err := m.Freeze(ctx, long); status(err) != 409 {
		t.Errorf("twice: %v", err)
	}
	if r, err := m.Renew(&Renew{Thaw: true}); err != nil || len(r.Steps) != 1 {
		t.Errorf("%+v %v", r, err)
	}
	if _, err := m.Freeze(ctx, &Freeze{TimeoutMS: 20}); err != nil {
		t.Error(err)
	}
	for deadline := time.Now().Add(10 * time.Second); len(c.said()) < 4 && time.Now().Before(deadline); {
		time.Sleep(time.Millisecond)
	}
	for i := range 2 {
		r, err := m.Renew(&Renew{Thaw: true})
		if _, early := r.Steps["thawed_early"]; err != nil || early != (i == 0) {
			t.Errorf("it has ended by itself, and is asked for the %d. time: %+v %v", i+1, r, err)
		}
	}
	_ = m.Thaw(true)
	if want := []string{"freeze", "keep", "freeze", "cancel"}; !reflect.DeepEqual(c.said(), want) {
		t.Errorf("got %v", c.said())
	}
}

// TestFreezeInVain: nothing may stay frozen that the host does not know of.
func TestFreezeInVain(t *testing.T) {
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	for name, tt := range map[string]struct {
		c    *crew
		ctx  context.Context
		ms   int64
		want []string
	}{
		"the commands fail": {&crew{fails: wire.Exhausted("x")}, context.Background(), 1000, []string{"freeze"}},
		"too slow":          {&crew{slow: 30 * time.Millisecond}, context.Background(), 20, []string{"freeze", "cancel"}},
		"the host is gone":  {&crew{}, gone, 1000, []string{"freeze", "cancel"}},
	} {
		m := &Machine{Commands: tt.c}
		if _, err := m.Freeze(tt.ctx, &Freeze{TimeoutMS: tt.ms}); status(err) != 503 {
			t.Errorf("%s: %v", name, err)
		}
		_ = m.Thaw(true)
		if !reflect.DeepEqual(tt.c.said(), tt.want) {
			t.Errorf("%s: %v", name, tt.c.said())
		}
	}
}
