package services

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"time"

	"cloche.dev/agent/internal/proc"
	"cloche.dev/agent/internal/tunnel"
)

// maxHeaders bounds what a server may send before its page.
const maxHeaders = 64 << 10

// ask is one check; "" says that the service is well, else it is why not.
func ask(ctx context.Context, m *proc.Manager, s *Spec) string {
	ctx, cancel := context.WithTimeout(ctx, millis(s.Health.TimeoutMS))
	defer cancel()
	h := s.Health
	switch {
	case h.TCPPort != 0:
		return askTCP(ctx, h.TCPPort)
	case h.HTTP != nil:
		return askHTTP(ctx, h.HTTP)
	}
	x, err := m.Probe(ctx, s.probe(commandID(s.Name, "check")))
	switch {
	case ctx.Err() != nil:
		return "the command of the health check took longer than its timeout"
	case err != nil:
		return "the command of the health check could not be started"
	case x.ExitCode != 0:
		return "the command of the health check ended with " + strconv.Itoa(x.ExitCode)
	}
	return ""
}

func askTCP(ctx context.Context, port int) string {
	conn, err := tunnel.Dial(ctx, port)
	if err != nil {
		return fmt.Sprintf("nothing takes connections on port %d", port)
	}
	_ = conn.Close()
	return ""
}

func askHTTP(ctx context.Context, h *HTTP) string {
	t := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return tunnel.Dial(ctx, h.Port)
		},
		DisableKeepAlives:      true,
		MaxResponseHeaderBytes: maxHeaders,
	}
	client := http.Client{
		Transport:     t,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://localhost:"+strconv.Itoa(h.Port)+h.Path, nil)
	if err != nil {
		return "the path of the health check is malformed"
	}
	res, err := client.Do(req)
	if err != nil {
		return fmt.Sprintf("nothing answers HTTP on port %d in time", h.Port)
	}
	_ = res.Body.Close()
	if h.Status == res.StatusCode || h.Status == 0 && res.StatusCode >= 200 && res.StatusCode < 400 {
		return ""
	}
	return fmt.Sprintf("port %d answers with status %d", h.Port, res.StatusCode)
}

// eager is how often a service is asked in its start period until it is well.
const eager = 500 * time.Millisecond

// pulse counts the checks of one run.
type pulse struct {
	h        *Health
	began    time.Time
	well     bool // it was, once
	failures int
}

// next is how long to wait before the next check.
func (p *pulse) next() time.Duration {
	every := millis(p.h.IntervalMS)
	if !p.well && time.Since(p.began) < millis(*p.h.StartMS) {
		return min(every, eager)
	}
	return every
}

// add takes the result of a check. It says whether there is something new, and
// whether the service is well then.
func (p *pulse) add(bad bool) (news, well bool) {
	if !bad {
		news = !p.well || p.failures >= p.h.Retries
		p.well, p.failures = true, 0
		return news, true
	}
	if !p.well && time.Since(p.began) < millis(*p.h.StartMS) {
		return false, false
	}
	p.failures++
	return p.failures == p.h.Retries, false
}
