package sftp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"cloche.dev/agent/internal/testhost"
)

// request is one packet: its type, its number, and fields that are uint32,
// uint64, string or []byte (raw).
func request(typ byte, id uint32, fields ...any) []byte {
	b := append([]byte{0, 0, 0, 0, typ}, binary.BigEndian.AppendUint32(nil, id)...)
	for _, f := range fields {
		switch f := f.(type) {
		case uint32:
			b = binary.BigEndian.AppendUint32(b, f)
		case int:
			b = binary.BigEndian.AppendUint32(b, uint32(f))
		case uint64:
			b = binary.BigEndian.AppendUint64(b, f)
		case string:
			b = append(binary.BigEndian.AppendUint32(b, uint32(len(f))), f...)
		case []byte:
			b = append(b, f...)
		}
	}
	binary.BigEndian.PutUint32(b, uint32(len(b)-4))
	return b
}

// reply is one answer, as far as the tests look at it.
type reply struct {
	typ  byte
	id   uint32
	rest in
}

// status is the code of an answer that is one.
func (r *reply) status() string {
	if r.typ != fxpStatus {
		return fmt.Sprintf("type %d", r.typ)
	}
	p := r.rest
	return fmt.Sprintf("%d %s", p.u32(), p.string())
}

func (r *reply) text() string {
	p := r.rest
	if r.typ == fxpName {
		p.u32()
	}
	return p.string()
}

// replies takes the answers apart; anything else than whole packets fails.
func replies(t testing.TB, b []byte) []*reply {
	t.Helper()
	var found []*reply
	for len(b) > 0 {
		if len(b) < 9 {
			t.Fatalf("%d bytes behind the last answer", len(b))
		}
		n := binary.BigEndian.Uint32(b)
		if n < 5 || n > maxPacket || uint32(len(b)-4) < n {
			t.Fatalf("an answer of %d bytes", n)
		}
		found = append(found, &reply{b[4], binary.BigEndian.Uint32(b[5:]), in{b: b[9 : 4+n]}})
		b = b[4+n:]
	}
	return found
}

// serve has one server answer all requests, inside of dir.
func serve(t testing.TB, dir string, plain bool, packets ...[]byte) ([]*reply, error) {
	t.Helper()
	t.Setenv("HOME", "/")
	var out bytes.Buffer
	var err error
	testhost.Jail(t, dir, func() { err = Serve(bytes.NewReader(bytes.Join(packets, nil)), &out, plain) })
	return replies(t, out.Bytes()), err
}

func statuses(t *testing.T, dir string, packets ...[]byte) []string {
	t.Helper()
	all, err := serve(t, dir, false, packets...)
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, r := range all {
		found = append(found, r.status())
	}
	return found
}

const none = 0

func TestFiles(t *testing.T) {
	dir := t.TempDir()
	all, err := serve(t, dir, false,
		request(fxpInit, 3),
		request(fxpOpen, 1, "/f", openRead|openWrite|openCreate|openExcl, none),
		request(fxpWrite, 2, "1", uint64(3), "defg"),
		request(fxpWrite, 3, "1", uint64(0), "abc"),
		request(fxpRead, 4, "1", uint64(1), 4),
		request(fxpRead, 5, "1", uint64(7), 4),
		request(fxpFstat, 6, "1"),
		request(fxpClose, 7, "1"),
		request(fxpClose, 8, "1"),
		request(fxpOpen, 9, "/f", openWrite|openAppend, none),
		request(fxpWrite, 10, "2", uint64(0), "hi"),
		request(fxpOpen, 11, "/f", openWrite|openCreate|openExcl, none),
	)
	if err != nil {
		t.Fatal(err)
	}
	if all[0].typ != fxpVersion || all[0].id != 3 {
		t.Errorf("the version: %+v", all[0])
	}
	if all[4].text() != "bcde" || all[5].status() != "1 End of file" || all[6].typ != fxpAttrs {
		t.Errorf("read %q, %s, %d", all[4].text(), all[5].status(), all[6].typ)
	}
	if all[8].status() != "4 bad file descriptor" || all[11].status() != "4 file exists" {
		t.Errorf("closed twice: %s; exclusive: %s", all[8].status(), all[11].status())
	}
	for n, r := range all[1:] {
		if r.id != uint32(n+1) {
			t.Errorf("answer %d has the number %d", n+1, r.id)
		}
	}
	if b, _ := os.ReadFile(filepath.Join(dir, "f")); string(b) != "abcdefghi" {
		t.Errorf("the file has %q", b)
	}
}

func TestNames(t *testing.T) {
	dir := t.TempDir()
	odd := "a\xff\n"
	for _, name := range []string{"x", "y", odd} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(name), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got := statuses(t, dir,
		request(fxpRename, 1, "/x", "/y"),
		request(fxpExtended, 2, "posix-rename@openssh.com", "/x", "/y"),
		request(fxpMkdir, 3, "/d", none),
		request(fxpRmdir, 4, "/y"),
		request(fxpRemove, 5, "/none"),
		request(fxpSymlink, 6, "says", "/link"),
		request(fxpExtended, 7, "hardlink@openssh.com", "/y", "/z"),
		request(fxpExtended, 8, "lsetstat@openssh.com", "/link", attrMode, 0o600),
		request(fxpSetstat, 9, "/y", attrMode|attrSize, uint64(0), 0o600),
	)
	want := []string{
		"4 file exists", "0 Success", "0 Success", "2 not a directory", "2 no such file or directory", "0 Success",
		"0 Success", "4 operation not supported", "0 Success",
	}
	for n := range want {
		if got[n] != want[n] {
			t.Errorf("answer %d is %q, want %q", n+1, got[n], want[n])
		}
	}
	if to, _ := os.Readlink(filepath.Join(dir, "link")); to != "says" {
		t.Errorf("the link says %q", to)
	}
	all, err := serve(t, dir, true,
		request(fxpSymlink, 1, "/plain", "to"), request(fxpOpendir, 2, "/"), request(fxpReaddir, 3, "1"),
		request(fxpReaddir, 4, "1"), request(fxpReaddir, 5, "1"), request(fxpRead, 6, "1", uint64(0), 1),
		request(fxpReadlink, 7, "/plain"), request(fxpRealpath, 8, "/d/../none"), request(fxpRealpath, 9, ""),
	)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]bool{}
	for _, r := range all[2:4] {
		p := r.rest
		for range p.u32() {
			name, long, a := p.string(), p.string(), p.attrs()
			found[name] = true
			if p.err != nil || a.flags == 0 || !strings.HasSuffix(long, " "+name) {
				t.Errorf("%q: %q, %v", name, long, p.err)
			}
		}
		if len(p.b) != 0 {
			t.Errorf("%d bytes behind the names", len(p.b))
		}
	}
	if len(found) != 8 || !found[odd] || !found["."] {
		t.Errorf("the directory has %v", found)
	}
	if all[4].status() != "1 End of file" || all[5].status() != "4 bad file descriptor" {
		t.Errorf("%s, %s", all[4].status(), all[5].status())
	}
	if all[6].text() != "to" || all[7].text() != "/none" || all[8].text() != "/" {
		t.Errorf("%q %q %q", all[6].text(), all[7].text(), all[8].text())
	}
}

// TestOddities has what must neither hang nor end the server.
func TestOddities(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mkfifo(filepath.Join(dir, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	cut := request(fxpWrite, 9, "1", uint64(0))
	cut = append(cut, 0xff, 0xff, 0xff, 0xff, 'x') // a text that claims 4 GiB
	binary.BigEndian.PutUint32(cut, uint32(len(cut)-4))
	got := statuses(t, dir,
		request(fxpOpen, 1, "/fifo", openWrite, none),
		request(fxpOpen, 2, "/fifo", openRead, none),
		request(fxpRead, 3, "1", uint64(0), 10),
		request(fxpOpen, 4, "/f", none, none),
		request(77, 5),
		request(fxpExtended, 6, "nonsense@example.com"),
		request(fxpRead, 7, "none", uint64(0), 1),
		request(fxpOpen, 8),
		cut,
		request(fxpSetstat, 10, "/f", attrExtended, 1<<31),
		request(fxpOpen, 11, "a\x00b", openRead, none),
		[]byte{0, 0, 0, 1, fxpStat},
		request(fxpMkdir, 13, "/cut")[:13+4],
	)
	want := []string{
		"4 no such device or address", "type 102", "4 illegal seek", "4 invalid argument", "8 Operation unsupported",
		"8 Operation unsupported", "4 bad file descriptor", short, short, short, "4 invalid argument", short, short,
	}
	for n := range want {
		if got[n] != want[n] {
			t.Errorf("answer %d is %q, want %q", n+1, got[n], want[n])
		}
	}
}

// short is said of packets that end before their fields do.
const short = "5 a packet that is too short"

func TestImpossibleLengths(t *testing.T) {
	dir := t.TempDir()
	for _, head := range [][]byte{{0, 0, 0, 0}, {0, 4, 0, 1}, {0xff, 0xff, 0xff, 0xff}} {
		if all, err := serve(t, dir, false, request(fxpStat, 1, "/"), head, request(fxpStat, 2, "/")); err == nil || len(all) > 1 {
			t.Errorf("%x: %v, %d answers", head, err, len(all))
		}
	}
	if _, err := serve(t, dir, false, request(fxpStat, 1, "/")[:8]); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("cut short: %v", err)
	}
}

func TestManyHandlesAndLongReads(t *testing.T) {
	dir := t.TempDir()
	big := bytes.Repeat([]byte("0123456789abcdef"), 1<<15)
	if err := os.WriteFile(filepath.Join(dir, "f"), big, 0o600); err != nil {
		t.Fatal(err)
	}
	var packets [][]byte
	for n := range maxHandles + 1 {
		packets = append(packets, request(fxpOpen, uint32(n), "/f", openRead, none))
	}
	packets = append(packets, request(fxpOpendir, 5000, "/"), request(fxpRead, 5001, "1", uint64(0), uint32(1<<32-1)),
		request(fxpRead, 5002, "1", uint64(1<<63), 10))
	all, err := serve(t, dir, false, packets...)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range all[maxHandles : maxHandles+2] {
		if r.status() != "4 too many open files" {
			t.Errorf("one handle too many: %s", r.status())
		}
	}
	if got := all[maxHandles+2].text(); got != string(big[:maxData]) {
		t.Errorf("read %d bytes", len(got))
	}
	if got := all[maxHandles+3].status(); got != "4 invalid argument" {
		t.Errorf("an impossible offset: %s", got)
	}
}

// FuzzServe feeds anything to a server; what it answers are whole packets, one
// for each whole request.
func FuzzServe(f *testing.F) {
	f.Add(request(fxpInit, 3))
	f.Add(bytes.Join([][]byte{
		request(fxpOpen, 1, "/f", openRead|openWrite|openCreate, none), request(fxpWrite, 2, "1", uint64(0), "abc"),
		request(fxpRead, 3, "1", uint64(0), 3), request(fxpFsetstat, 4, "1", attrSize|attrTimes, uint64(1), 1, 2),
		request(fxpOpendir, 5, "/"), request(fxpReaddir, 6, "2"), request(fxpClose, 7, "1"),
	}, nil))
	f.Add(bytes.Join([][]byte{
		request(fxpExtended, 1, "statvfs@openssh.com", "/"), request(fxpExtended, 2, "expand-path@openssh.com", "~/x"),
		request(fxpExtended, 3, "limits@openssh.com"), request(fxpExtended, 4, "lsetstat@openssh.com", "/l", attrOwner, 1, 1),
		request(fxpSymlink, 5, "/a", "/b"), request(fxpRealpath, 6, "/b/../c"), request(fxpRename, 7, "/b", "/d"),
	}, nil))
	f.Add([]byte{0, 0, 0, 5, fxpRead, 0, 0, 0, 1})
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, b []byte) {
		all, err := serve(t, dir, len(b)%2 == 0, b)
		requests := 0
		for len(b) >= 4 {
			n := binary.BigEndian.Uint32(b)
			if n == 0 || n > maxPacket || uint32(len(b)-4) < n {
				break
			}
			b, requests = b[4+n:], requests+1
		}
		if len(all) != requests || (err == nil) != (len(b) == 0) {
			t.Errorf("%d answers to %d requests, %d bytes left, %v", len(all), requests, len(b), err)
		}
	})
}
