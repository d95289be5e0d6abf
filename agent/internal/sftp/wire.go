package sftp

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"syscall"
)

// Types of packets, of draft-ietf-secsh-filexfer-02.
const (
	fxpInit     = 1
	fxpVersion  = 2
	fxpOpen     = 3
	fxpClose    = 4
	fxpRead     = 5
	fxpWrite    = 6
	fxpLstat    = 7
	fxpFstat    = 8
	fxpSetstat  = 9
	fxpFsetstat = 10
	fxpOpendir  = 11
	fxpReaddir  = 12
	fxpRemove   = 13
	fxpMkdir    = 14
	fxpRmdir    = 15
	fxpRealpath = 16
	fxpStat     = 17
	fxpRename   = 18
	fxpReadlink = 19
	fxpSymlink  = 20
	fxpStatus   = 101
	fxpHandle   = 102
	fxpData     = 103
	fxpName     = 104
	fxpAttrs    = 105
	fxpExtended = 200
	fxpReply    = 201
)

// Codes of a status.
const (
	fxOK          = 0
	fxEOF         = 1
	fxNoSuchFile  = 2
	fxPermission  = 3
	fxFailure     = 4
	fxBadMessage  = 5
	fxUnsupported = 8
)

// Flags of attributes and of open.
const (
	attrSize     = 1
	attrOwner    = 2
	attrMode     = 4
	attrTimes    = 8
	attrExtended = 1 << 31

	openRead   = 1
	openWrite  = 2
	openAppend = 4
	openCreate = 8
	openTrunc  = 16
	openExcl   = 32
)

var errShort = errors.New("a packet that is too short")

// in reads the fields of a packet. After the first failure everything is empty.
type in struct {
	b   []byte
	err error
}

func (p *in) take(n int) []byte {
	if p.err != nil || n < 0 || n > len(p.b) {
		p.err = errShort
		return nil
	}
	b := p.b[:n]
	p.b = p.b[n:]
	return b
}

func (p *in) u32() uint32 {
	if b := p.take(4); b != nil {
		return binary.BigEndian.Uint32(b)
	}
	return 0
}

func (p *in) u64() uint64 {
	if b := p.take(8); b != nil {
		return binary.BigEndian.Uint64(b)
	}
	return 0
}

func (p *in) bytes() []byte  { return p.take(int(p.u32())) }
func (p *in) string() string { return string(p.bytes()) }

// out builds the packet of an answer behind four bytes for its length.
type out struct{ b []byte }

func (p *out) begin(typ byte, id uint32) *out {
	p.b = append(p.b[:0], 0, 0, 0, 0, typ)
	return p.u32(id)
}

func (p *out) u32(v uint32) *out {
	p.b = binary.BigEndian.AppendUint32(p.b, v)
	return p
}

func (p *out) u64(v uint64) *out {
	p.b = binary.BigEndian.AppendUint64(p.b, v)
	return p
}

func (p *out) string(s string) *out {
	p.u32(uint32(len(s)))
	p.b = append(p.b, s...)
	return p
}

func (p *out) done() []byte {
	binary.BigEndian.PutUint32(p.b, uint32(len(p.b)-4))
	return p.b
}

// code is the status of an error, and what is said about it.
func code(err error) (uint32, string) {
	var no syscall.Errno
	switch {
	case err == nil:
		return fxOK, "Success"
	case errors.Is(err, errEnd):
		return fxEOF, "End of file"
	case errors.Is(err, errShort):
		return fxBadMessage, err.Error()
	case errors.Is(err, errors.ErrUnsupported) && !errors.As(err, &no):
		return fxUnsupported, "Operation unsupported"
	case errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) || errors.Is(err, syscall.ELOOP):
		return fxNoSuchFile, reason(err)
	case errors.Is(err, fs.ErrPermission):
		return fxPermission, reason(err)
	}
	return fxFailure, reason(err)
}

// reason is the cause without the path, which the client knows.
func reason(err error) string {
	var no syscall.Errno
	if errors.As(err, &no) {
		return no.Error()
	}
	return err.Error()
}
