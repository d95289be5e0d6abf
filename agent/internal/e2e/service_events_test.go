package e2e

import (
	"strings"
	"testing"

	"cloche.dev/agent/internal/services"
)

// happened are the next events behind a place.
func (a *agent) happened(after string) services.Told {
	a.t.Helper()
	var told services.Told
	if _, e := a.call("GET", "/v1/service-events?timeout_ms=20000&after="+after, nil, &told); e != nil {
		a.t.Fatalf("%+v", e)
	}
	return told
}

func TestServiceEvents(t *testing.T) {
	a := start(t)
	check := func(shell string) fields {
		return fields{"shell": shell, "start_ms": 0, "interval_ms": 10, "retries": 1}
	}
	place := ""
	for name, c := range map[string]struct {
		spec fields
		want string
	}{
		"done":    {fields{"shell": "exit 0"}, "started exited"},
		"loops":   {fields{"shell": "exit 3", "backoff_ms": 1, "max_restarts": 1}, "started exited started exited gave_up"},
		"missing": {fields{"argv": []string{"/none"}, "restart": "no"}, "started exited gave_up"},
		"nobody":  {fields{"shell": "x", "user": "no-such-user", "restart": "no"}, "exited gave_up"},
		"unwell":  {fields{"shell": "sleep 600", "restart": "no", "health": check("false")}, "started unhealthy"},
		"well":    {fields{"shell": "sleep 600", "health": check("true")}, "started healthy"},
	} {
		a.define(name, c.spec)
		var got []string
		var events []services.Event
		for len(got) < len(strings.Fields(c.want)) {
			told := a.happened(place)
			if len(told.Events) == 0 || told.Services == 0 || told.Lost != 0 {
				t.Fatalf("%s: only %q, and %+v", name, got, told)
			}
			for _, e := range told.Events {
				got, events = append(got, e.Kind), append(events, e)
				if e.Name != name || e.AtNS == 0 {
					t.Errorf("%s: %+v", name, e)
				}
			}
			place = told.Next
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("%s: %q", name, got)
		}
		if e := events[1]; name == "loops" && (e.ExitCode == nil || *e.ExitCode != 3 || e.RetryMS != 1 || events[3].RetryMS != 0 || events[3].Restarts != 1) {
			t.Errorf("got %+v", events)
		}
		if e := events[0]; name == "nobody" && (e.ExitCode != nil || !strings.Contains(e.Detail, "user")) {
			t.Errorf("got %+v", e)
		}
		a.call("DELETE", "/v1/services/"+name, nil, &[]byte{})
		if c.want == "started healthy" || c.want == "started unhealthy" {
			told := a.happened(place)
			if e := told.Events[0]; e.Kind != "exited" || e.Detail != "it was stopped" || e.RetryMS != 0 {
				t.Errorf("a stop tells %+v", e)
			}
			place = told.Next
		}
	}
	if _, e := a.call("GET", "/v1/service-events?after="+strings.Repeat("x", 65), nil, nil); e == nil || e.Field != "after" {
		t.Errorf("got %+v", e)
	}
}
