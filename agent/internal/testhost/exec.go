package testhost

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"

	"cloche.dev/agent/internal/wire"
)

// Result is a command's collected output.
type Result struct {
	Started  wire.Started
	Exit     *wire.Exit
	Stdout   []byte
	Stderr   []byte
	Gaps     []wire.Gap
	Frames   int
	position uint64
}

// Do makes one call with a JSON body or none, and decodes a JSON answer into
// out. A status that is not a success comes back as *wire.Error.
func (c *Client) Do(ctx context.Context, method, path string, in, out any) (int, error) {
	var body io.Reader
	switch v := in.(type) {
	case nil:
	case []byte:
		body = bytes.NewReader(v)
	case io.Reader:
		body = v
	default:
		b, err := json.Marshal(v)
		if err != nil {
			return 0, err
		}
		body = bytes.NewReader(b)
	}
	res, err := c.Open(ctx, method, path, body)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		return res.StatusCode, err
	}
	if p, ok := out.(*[]byte); ok {
		*p = b
		return res.StatusCode, nil
	}
	if out != nil {
		err = json.Unmarshal(b, out)
	}
	return res.StatusCode, err
}

// Open makes a call and leaves the answer to be read.
func (c *Client) Open(ctx context.Context, method, path string, body io.Reader) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://agent"+path, body)
	if err != nil {
		return nil, err
	}
	res, err := c.Client.Do(req)
	if err != nil || res.StatusCode < 400 {
		return res, err
	}
	defer res.Body.Close()
	e := &wire.Error{Status: res.StatusCode}
	if err := json.NewDecoder(res.Body).Decode(e); err != nil {
		return nil, fmt.Errorf("status %d without an error body: %w", res.StatusCode, err)
	}
	return nil, e
}

// Exec runs a command to its end.
func (c *Client) Exec(ctx context.Context, req map[string]any) (*Result, error) {
	b, err := json.Marshal(req)
	if err != nil {
		return nil, err
	}
	res, err := c.Open(ctx, "POST", "/v1/exec", bytes.NewReader(b))
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	return Collect(res.Body)
}

// Collect reads frames up to the end of the stream.
func Collect(r io.Reader) (*Result, error) {
	out := &Result{}
	for {
		if err := out.Next(r); err != nil {
			if err == io.EOF && out.Exit != nil {
				return out, nil
			}
			return out, fmt.Errorf("stream ended early: %w", err)
		}
	}
}

// Next reads one frame.
func (r *Result) Next(from io.Reader) error {
	var h [wire.HeaderSize]byte
	if _, err := io.ReadFull(from, h[:]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(h[9:])
	if n > wire.MaxPayload {
		return wire.ErrLength
	}
	b := make([]byte, int(n)+len(h))
	copy(b, h[:])
	if _, err := io.ReadFull(from, b[len(h):]); err != nil {
		return fmt.Errorf("a frame is cut: %w", err)
	}
	f, _, err := wire.Decode(b)
	if err != nil {
		return err
	}
	return r.add(f)
}

func (r *Result) add(f wire.Frame) error {
	if r.Exit != nil {
		return fmt.Errorf("frame of type %d after exit", f.Type)
	}
	if (r.Frames == 0) != (f.Type == wire.TypeStarted) {
		return fmt.Errorf("frame %d has type %d", r.Frames, f.Type)
	}
	if r.Frames == 0 {
		r.position = f.Offset
	}
	r.Frames++
	if f.Offset != r.position {
		return fmt.Errorf("frame %d has offset %d instead of %d", r.Frames, f.Offset, r.position)
	}
	switch f.Type {
	case wire.TypeStarted:
		return json.Unmarshal(f.Payload, &r.Started)
	case wire.TypeStdout:
		r.Stdout = append(r.Stdout, f.Payload...)
		r.position += uint64(len(f.Payload))
	case wire.TypeStderr:
		r.Stderr = append(r.Stderr, f.Payload...)
		r.position += uint64(len(f.Payload))
	case wire.TypeGap:
		var g wire.Gap
		if err := json.Unmarshal(f.Payload, &g); err != nil {
			return err
		}
		r.Gaps = append(r.Gaps, g)
		r.position += uint64(g.Bytes)
	case wire.TypeExit:
		r.Exit = &wire.Exit{}
		return json.Unmarshal(f.Payload, r.Exit)
	}
	return nil
}
