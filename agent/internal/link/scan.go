// Package link speaks the lowest layer of the agent protocol: it brings a
// byte pipe that may hold rests of an older conversation into step with the
// host, and then runs HTTP/2 sessions on it, one after another.
package link

import "strconv"

// Generation is the highest generation of the protocol that the agent speaks.
const Generation = 1

const (
	preface    = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
	syncPrefix = "CLOCHE-SYNC "
	nonceLen   = 32
	maxDigits  = 9
	maxLine    = len(syncPrefix) + nonceLen + 1 + maxDigits
)

// Event says what a Scanner has met.
type Event int

// The events of a Scanner.
const (
	None    Event = iota // all input was used up
	Sync                 // a complete synchronisation line
	Preface              // the HTTP/2 client preface, after at least one line
)

// Scanner looks for synchronisation lines and then for the HTTP/2 preface in
// a stream of otherwise meaningless bytes. It keeps its state between calls,
// so the input may be cut anywhere. The zero value is ready.
type Scanner struct {
	line    [maxLine]byte
	n       int  // bytes of line in use
	inLine  bool // a newline has been seen and the line is not too long yet
	synced  bool // a line has been met
	matched int  // bytes of the preface met so far
}

// Feed takes bytes up to and including the next event and returns how many it
// took. With Sync comes what an echo repeats: the nonce and the number.
func (s *Scanner) Feed(b []byte) (int, Event, string) {
	for i, c := range b {
		if s.synced && s.matchPreface(c) {
			*s = Scanner{}
			return i + 1, Preface, ""
		}
		if c != '\n' {
			s.collect(c)
			continue
		}
		line := s.line[:s.n]
		found := s.inLine && validSync(line)
		s.inLine, s.n = true, 0
		if found {
			s.synced = true
			return i + 1, Sync, string(line[len(syncPrefix):])
		}
	}
	return len(b), None, ""
}

func (s *Scanner) collect(c byte) {
	if !s.inLine {
		return
	}
	if s.n == maxLine {
		s.inLine = false
		return
	}
	s.line[s.n] = c
	s.n++
}

// matchPreface advances the search for the preface by one byte. The only part
// of the preface that is also its beginning is the P of HTTP.
func (s *Scanner) matchPreface(c byte) bool {
	const afterHTTP = len("PRI * HTTP")
	if c != preface[s.matched] && s.matched == afterHTTP {
		s.matched = 1
	}
	switch c {
	case preface[s.matched]:
		s.matched++
	case preface[0]:
		s.matched = 1
	default:
		s.matched = 0
	}
	return s.matched == len(preface)
}

// validSync checks a line without its newlines: the prefix, 32 lower-case hex
// digits, a blank, and a decimal number without leading zeros.
func validSync(line []byte) bool {
	const head = len(syncPrefix) + nonceLen
	if len(line) < head+2 || string(line[:len(syncPrefix)]) != syncPrefix || line[head] != ' ' {
		return false
	}
	for _, c := range line[len(syncPrefix):head] {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	digits := line[head+1:]
	if digits[0] == '0' && len(digits) > 1 {
		return false
	}
	for _, c := range digits {
		if c < '0' || c > '9' {
			return false
		}
	}
	return true
}

// echo is the answer to a synchronisation line.
func echo(text string) []byte {
	b := make([]byte, 0, maxLine+16)
	b = append(b, "\nCLOCHE-SYNC-OK "...)
	b = append(b, text...)
	b = append(b, ' ')
	b = strconv.AppendInt(b, Generation, 10)
	return append(b, '\n')
}
