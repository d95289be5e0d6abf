package sys

import "time"

const (
	firstPause = 100 * time.Microsecond
	lastPause  = 10 * time.Millisecond
)

// Await asks until ok holds or the deadline has passed, and says which. The
// pauses grow: what is soon true is soon noticed, and a long wait costs little.
func Await(deadline time.Time, ok func() bool) bool {
	for pause := firstPause; !ok(); pause = min(2*pause, lastPause) {
		if time.Now().After(deadline) {
			return false
		}
		time.Sleep(pause)
	}
	return true
}
