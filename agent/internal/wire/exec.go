package wire

// Reasons of an exit event.
const (
	ReasonExited      = "exited"
	ReasonSignaled    = "signaled"
	ReasonTimeout     = "timeout"
	ReasonOOM         = "oom"
	ReasonCancelled   = "cancelled"
	ReasonOutputLimit = "output_limit"
)

// Started is the first event of an exec stream.
type Started struct {
	PID       int   `json:"pid"`
	StartedNS int64 `json:"started_ns"`
	// Bytes of each stream before the offset at which the output begins; absent
	// where they are not known any more.
	StdoutAt *uint64 `json:"stdout_at,omitempty"`
	StderrAt *uint64 `json:"stderr_at,omitempty"`
}

// Gap stands for output that was dropped at this point of the stream.
type Gap struct {
	Stream int   `json:"stream"`
	Bytes  int64 `json:"bytes"`
	// Behind a gap of both streams: bytes of each of them before this point.
	StdoutAt *uint64 `json:"stdout_at,omitempty"`
	StderrAt *uint64 `json:"stderr_at,omitempty"`
}

// Exit is the last event of an exec stream.
type Exit struct {
	ExitCode      int     `json:"exit_code"`
	Reason        string  `json:"reason"`
	Signal        string  `json:"signal,omitempty"`
	SignalNumber  int     `json:"signal_number,omitempty"`
	DurationMS    float64 `json:"duration_ms"`
	UserMS        float64 `json:"user_ms"`
	SystemMS      float64 `json:"system_ms"`
	MaxRSSKB      int64   `json:"max_rss_kb"`
	Detail        string  `json:"detail,omitempty"`
	StdoutBytes   int64   `json:"stdout_bytes"`
	StderrBytes   int64   `json:"stderr_bytes"`
	StdoutDropped int64   `json:"stdout_dropped"`
	StderrDropped int64   `json:"stderr_dropped"`
	// Processes of the command that the kernel has killed for want of memory,
	// however the command itself has ended.
	OOMKills int64 `json:"oom_kills,omitempty"`
}
