package files

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"

	"cloche.dev/agent/internal/users"
	"cloche.dev/agent/internal/wire"
)

var (
	rootUser  = &users.Identity{Name: "root", Groups: []uint32{0}}
	plainUser = &users.Identity{UID: 54321, GID: 54321, Groups: []uint32{54321}, Name: "54321"}
)

// setup gives a directory that both users may enter, with one of their own.
func setup(t *testing.T) (*FS, string) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	dir, err := os.MkdirTemp("/tmp", "files")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	must(t, os.Chmod(dir, 0o755))
	must(t, os.Mkdir(dir+"/u", 0o755))
	must(t, os.Chown(dir+"/u", 54321, 54321))
	return &FS{Users: users.New("/etc/passwd", "/etc/group")}, dir
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func put(f *FS, id *users.Identity, path, body string) (*Written, error) {
	return f.Write(id, &Put{Path: path, Parents: true}, strings.NewReader(body))
}

func code(err error) string {
	var e *wire.Error
	if err == nil {
		return ""
	}
	if !errors.As(err, &e) {
		return "?" + err.Error()
	}
	return e.Code
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	must(t, err)
	return string(b)
}

func stat(t *testing.T, path string) *syscall.Stat_t {
	t.Helper()
	var st syscall.Stat_t
	must(t, syscall.Lstat(path, &st))
	return &st
}

// names lists a directory, to see that no temporary file has been left.
func names(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func TestWriteMakesParentsOfTheUser(t *testing.T) {
	f, dir := setup(t)
	w, err := put(f, plainUser, dir+"/u/a/b/c.txt", "hello")
	must(t, err)
	if !w.Created || w.Bytes != 5 || read(t, dir+"/u/a/b/c.txt") != "hello" {
		t.Errorf("got %+v", w)
	}
	for _, p := range []string{"/u/a", "/u/a/b", "/u/a/b/c.txt"} {
		if st := stat(t, dir+p); st.Uid != 54321 || st.Gid != 54321 {
			t.Errorf("%s belongs to %d:%d", p, st.Uid, st.Gid)
		}
	}
	if m := stat(t, dir+"/u/a/b/c.txt").Mode & 0o7777; m != 0o644 {
		t.Errorf("mode %o", m)
	}
	if _, err := put(f, plainUser, dir+"/x/y", "no"); code(err) != "permission_denied" {
		t.Errorf("got %v", err)
	}
	_, err = f.Write(rootUser, &Put{Path: dir + "/none/x"}, strings.NewReader(""))
	if code(err) != "not_found" {
		t.Errorf("without parents: %v", err)
	}
}

func TestWriteKeepsModeAndOwner(t *testing.T) {
	f, dir := setup(t)
	p := dir + "/script"
	must(t, os.WriteFile(p, []byte("old"), 0o600))
	must(t, os.Chown(p, 54321, 7))
	must(t, os.Chmod(p, 0o755))
	w, err := put(f, rootUser, p, "new")
	must(t, err)
	st := stat(t, p)
	if w.Created || st.Mode&0o7777 != 0o755 || st.Uid != 54321 || st.Gid != 7 || read(t, p) != "new" {
		t.Errorf("got %+v mode %o owner %d:%d", w, st.Mode, st.Uid, st.Gid)
	}
	mode, mtime := uint32(0o4750), int64(1_000_000_000_123_456_789)
	_, err = f.Write(rootUser, &Put{Path: p, Mode: &mode, MtimeNS: &mtime}, strings.NewReader("x"))
	must(t, err)
	if st := stat(t, p); st.Mode&0o7777 != mode || st.Mtim.Nano() != mtime {
		t.Errorf("mode %o, time %d", st.Mode, st.Mtim.Nano())
	}
}

func TestWriteByOthers(t *testing.T) {
	f, dir := setup(t)
	shared := dir + "/u/shared"
	must(t, os.WriteFile(shared, []byte("old"), 0o600))
	must(t, os.Chmod(shared, 0o666|os.ModeSetuid))
	_, err := put(f, plainUser, shared, "new")
	must(t, err)
	if st := stat(t, shared); st.Uid != 0 || st.Mode&0o7777 != 0o666 {
		t.Errorf("owner %d, mode %o: the owner stays, the special bit goes", st.Uid, st.Mode)
	}
	mode := uint32(0o777)
	_, err = f.Write(plainUser, &Put{Path: shared, Mode: &mode}, strings.NewReader("x"))
	if code(err) != "permission_denied" {
		t.Errorf("mode of a file of somebody else: %v", err)
	}
	locked := dir + "/u/locked"
	must(t, os.WriteFile(locked, nil, 0o444))
	if _, err := put(f, plainUser, locked, "x"); code(err) != "permission_denied" {
		t.Errorf("file without write permission: %v", err)
	}
	// The file may be written, the directory may not.
	inPlace := dir + "/open"
	must(t, os.WriteFile(inPlace, []byte("a longer text"), 0o600))
	must(t, os.Chmod(inPlace, 0o666))
	_, err = put(f, plainUser, inPlace, "short")
	must(t, err)
	if read(t, inPlace) != "short" {
		t.Error(read(t, inPlace))
	}
}

func TestWriteThroughLinks(t *testing.T) {
	f, dir := setup(t)
	must(t, os.WriteFile(dir+"/u/real", []byte("old"), 0o640))
	must(t, os.Chown(dir+"/u/real", 54321, 54321))
	must(t, os.Symlink("real", dir+"/u/link"))
	must(t, os.Symlink("link", dir+"/u/chain"))
	must(t, os.Symlink("../u/new", dir+"/u/dangling"))
	must(t, os.Symlink("loop", dir+"/u/loop"))
	must(t, os.Symlink(dir+"/secret", dir+"/u/out"))
	must(t, os.WriteFile(dir+"/secret", []byte("secret"), 0o600))
	_, err := put(f, plainUser, dir+"/u/chain", "new")
	must(t, err)
	if read(t, dir+"/u/real") != "new" || stat(t, dir+"/u/link").Mode&syscall.S_IFMT != syscall.S_IFLNK {
		t.Error("the link's target must be replaced and the link stay")
	}
	w, err := put(f, plainUser, dir+"/u/dangling", "made")
	must(t, err)
	if !w.Created || read(t, dir+"/u/new") != "made" {
		t.Errorf("got %+v", w)
	}
	if _, err := put(f, plainUser, dir+"/u/loop", "x"); code(err) != "conflict" {
		t.Errorf("loop: %v", err)
	}
	if _, err := put(f, plainUser, dir+"/u/out", "x"); code(err) != "permission_denied" {
		t.Errorf("link to a file of root: %v", err)
	}
	if read(t, dir+"/secret") != "secret" {
		t.Error("a user wrote into root's file")
	}
}

func TestWriteRefuses(t *testing.T) {
	f, dir := setup(t)
	must(t, syscall.Mkfifo(dir+"/fifo", 0o666))
	for path, want := range map[string]string{
		dir:                                  "is_directory",
		dir + "/x/":                          "is_directory",
		"/":                                  "is_directory",
		dir + "/fifo":                        "not_a_regular_file",
		"/dev/null":                          "not_a_regular_file",
		dir + "/" + strings.Repeat("x", 256): "too_large",
		dir + "/fifo/x":                      "not_a_directory",
		dir + "/" + strings.Repeat("y/", 3000) + "z": "too_large",
	} {
		if _, err := put(f, rootUser, path, "x"); code(err) != want {
			t.Errorf("%.60s: got %v, want %s", path, err, want)
		}
	}
	if got := names(t, dir); !slices.Equal(got, []string{"fifo", "u"}) {
		t.Errorf("left behind: %v", got)
	}
}

func TestCutUploadLeavesNothing(t *testing.T) {
	f, dir := setup(t)
	p := dir + "/f"
	must(t, os.WriteFile(p, []byte("old"), 0o644))
	broken := func() io.Reader {
		return io.MultiReader(bytes.NewReader(make([]byte, 300_000)), iotest.ErrReader(io.ErrUnexpectedEOF))
	}
	for _, put := range []*Put{{Path: p}, {Path: p, Append: true}, {Path: dir + "/new"}, {Path: dir + "/new", Append: true}} {
		if _, err := f.Write(rootUser, put, broken()); err == nil {
			t.Errorf("%+v: no error", put)
		}
	}
	if got := names(t, dir); read(t, p) != "old" || !slices.Equal(got, []string{"f", "u"}) {
		t.Errorf("content %q, files %v", read(t, p), got)
	}
}

func TestAppend(t *testing.T) {
	f, dir := setup(t)
	p := dir + "/u/log"
	for i, want := range []bool{true, false} {
		w, err := f.Write(plainUser, &Put{Path: p, Append: true}, strings.NewReader("line\n"))
		must(t, err)
		if w.Created != want {
			t.Errorf("append %d: %+v", i, w)
		}
	}
	if read(t, p) != "line\nline\n" || stat(t, p).Uid != 54321 {
		t.Errorf("got %q", read(t, p))
	}
}

func TestReaderSeesOldOrNew(t *testing.T) {
	f, dir := setup(t)
	p := dir + "/f"
	a, b := strings.Repeat("A", 1<<20), strings.Repeat("B", 1<<20)
	_, err := put(f, rootUser, p, a)
	must(t, err)
	stop := make(chan struct{})
	done := make(chan error, 1)
	go func() {
		for {
			select {
			case <-stop:
				done <- nil
				return
			default:
			}
			if s, err := os.ReadFile(p); err != nil || string(s) != a && string(s) != b {
				done <- fmt.Errorf("saw %d bytes, error %v", len(s), err)
				return
			}
		}
	}()
	for i := range 20 {
		_, err := put(f, rootUser, p, []string{b, a}[i%2])
		must(t, err)
	}
	close(stop)
	must(t, <-done)
}

func TestOpen(t *testing.T) {
	f, dir := setup(t)
	must(t, os.WriteFile(dir+"/f", []byte("content"), 0o640))
	must(t, syscall.Mkfifo(dir+"/fifo", 0o666))
	c, err := f.Open(rootUser, dir+"/f")
	must(t, err)
	defer c.Close()
	var b bytes.Buffer
	must(t, c.CopyTo(&b))
	if c.Size != 7 || b.String() != "content" || c.Mode != 0o640 {
		t.Errorf("got %+v, %q", c, b.String())
	}
	for path, want := range map[string]string{
		dir: "is_directory", dir + "/fifo": "not_a_regular_file", dir + "/no": "not_found", "/dev/zero": "not_a_regular_file",
	} {
		if _, err := f.Open(rootUser, path); code(err) != want {
			t.Errorf("%s: %v", path, err)
		}
	}
	if _, err := f.Open(plainUser, dir+"/f"); code(err) != "permission_denied" {
		t.Errorf("another user: %v", err)
	}
	proc, err := f.Open(plainUser, "/proc/self/status")
	must(t, err)
	defer proc.Close()
	b.Reset()
	must(t, proc.CopyTo(&b))
	if proc.Size != -1 || b.Len() == 0 {
		t.Errorf("a file of /proc: size %d, %d bytes", proc.Size, b.Len())
	}
}

func TestShrunkFile(t *testing.T) {
	f, dir := setup(t)
	must(t, os.WriteFile(dir+"/f", make([]byte, 100), 0o640))
	c, err := f.Open(rootUser, dir+"/f")
	must(t, err)
	defer c.Close()
	must(t, os.Truncate(dir+"/f", 50))
	if err := c.CopyTo(io.Discard); !errors.Is(err, ErrShrunk) {
		t.Errorf("got %v", err)
	}
}

func TestSplit(t *testing.T) {
	for path, want := range map[string][2]string{
		"/": {"/", ""}, "/a": {"/", "a"}, "/a/b": {"/a", "b"}, "/a/b/": {"/a", "b"}, "//a": {"/", "a"},
		"/a//b": {"/a", "b"}, "/a/..": {"/a/..", ""}, "/a/.": {"/a/.", ""}, "///": {"/", ""},
	} {
		if dir, base := split(path); dir != want[0] || base != want[1] {
			t.Errorf("%s: %q %q", path, dir, base)
		}
	}
}

func FuzzSplit(f *testing.F) {
	f.Add("/a/b")
	f.Add("//../x//")
	f.Fuzz(func(t *testing.T, path string) {
		if CheckPath("path", path) != nil {
			return
		}
		dir, base := split(path)
		if dir == "" || dir[0] != '/' || strings.Contains(base, "/") || base == "." || base == ".." {
			t.Fatalf("%q: %q %q", path, dir, base)
		}
		if base != "" && filepath.Clean(join(dir, base)) != filepath.Clean(path) {
			t.Fatalf("%q became %q", path, join(dir, base))
		}
	})
}
