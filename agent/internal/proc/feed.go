package proc

import (
	"context"
	"errors"
	"io"
	"time"
)

// feedPiece is what a feed reads at once.
const feedPiece = 128 << 10

// Feed is the input of a running command, for one writer after the other.
type Feed struct{ in *input }

// Feed finds the input of a running command.
func (m *Manager) Feed(id string) (*Feed, error) {
	in, err := m.interactive(id)
	if err == nil && in.isClosed() {
		err = inputClosed()
	}
	if err != nil {
		return nil, err
	}
	return &Feed{in}, nil
}

// From writes what comes until its end, which is the end of the input of a pipe
// as well, or until the command takes no more. It fails when the host breaks off.
func (f *Feed) From(ctx context.Context, body io.Reader) (Written, error) {
	buf := make([]byte, feedPiece)
	var total Written
	for {
		n, err := body.Read(buf)
		for piece := buf[:n]; len(piece) > 0 && !total.Closed; {
			done, werr := f.in.write(ctx, piece, time.Hour)
			if ctx.Err() != nil {
				return total, ctx.Err()
			}
			total.Bytes += done.Bytes
			total.Closed = done.Closed || werr != nil
			piece = piece[done.Bytes:]
		}
		switch {
		case total.Closed:
			return total, nil
		case errors.Is(err, io.EOF):
			if !f.in.tty {
				f.in.close()
				total.Closed = true
			}
			return total, nil
		case err != nil:
			return total, err
		}
	}
}
