package files

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"
	"time"

	"cloche.dev/agent/internal/wire"
)

func pack(t *testing.T, f *FS, r *PackRequest) []byte {
	t.Helper()
	p, err := f.NewPack(bg, rootUser, r)
	must(t, err)
	var out bytes.Buffer
	must(t, p.WriteTo(bg, &out))
	return out.Bytes()
}

func TestArchivesRoundTrip(t *testing.T) {
	f, d := tree(t)
	old := time.Unix(1_500_000_000, 0)
	must(t, os.Chtimes(d+"/src/a.go", old, old))
	must(t, os.Chmod(d+"/src/deep", 0o555))
	for _, format := range []string{"tar", "tar.gz", "zip"} {
		b := pack(t, f, &PackRequest{Path: d, Format: format})
		to := d + "/../u/" + format
		done, err := f.Extract(bg, plainUser, &ExtractRequest{Path: to, Format: format}, bytes.NewReader(b))
		must(t, err)
		if read(t, to+"/src/deep/b.py") != read(t, d+"/src/deep/b.py") || read(t, to+"/bad\xff\xfe.txt") != "alpha beta\n" {
			t.Error(format, "content")
		}
		st := stat(t, to+"/src/deep/b.py")
		if st.Uid != 54321 || st.Mode&0o777 != 0o755 || stat(t, to+"/src/deep").Mode&0o777 != 0o555 || stat(t, to+"/src/a.go").Mtim.Sec != 1_500_000_000 {
			t.Errorf("%s: %+v", format, st)
		}
		if l, err := os.Readlink(to + "/link"); err != nil || l != "src/a.go" {
			t.Error(format, l, err)
		}
		if format != "zip" && (stat(t, to+"/src/hard").Ino != stat(t, to+"/src/a.go").Ino || done.Skipped != 1) {
			t.Errorf("%s: %+v", format, done)
		}
		if len(names(t, to)) != map[string]int{"tar": 3, "tar.gz": 3, "zip": 3}[format] {
			t.Errorf("%s: %v", format, names(t, to))
		}
	}
}

func TestOtherProgramsReadIt(t *testing.T) {
	f, d := tree(t)
	b := pack(t, f, &PackRequest{Path: d, Format: "tar"})
	to := t.TempDir()
	cmd := exec.Command("tar", "-x", "-C", to)
	cmd.Stdin = bytes.NewReader(b)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	if read(t, to+"/bad\xff\xfe.txt") != "alpha beta\n" {
		t.Error("content")
	}
	// And the other way round, with names, links and holes as GNU tar writes them.
	must(t, os.WriteFile(to+"/"+strings.Repeat("n", 200), []byte("long"), 0o644))
	must(t, os.WriteFile(to+"/sparse", []byte("x"), 0o644))
	must(t, os.Truncate(to+"/sparse", 10<<20))
	made, err := exec.Command("tar", "-c", "-z", "-S", "-C", to, ".").Output()
	must(t, err)
	back := d + "/../back"
	if _, err := f.Extract(bg, rootUser, &ExtractRequest{Path: back, Format: "tar.gz"}, bytes.NewReader(made)); err != nil {
		t.Fatal(err)
	}
	if read(t, back+"/"+strings.Repeat("n", 200)) != "long" || stat(t, back+"/sparse").Size != 10<<20 {
		t.Error("content")
	}
}

func TestPackOfOddThings(t *testing.T) {
	f, d := tree(t)
	must(t, os.WriteFile(d+"/closed", []byte("x"), 0o600))
	l, err := net.Listen("unix", d+"/sock")
	must(t, err)
	defer l.Close()
	_, err = f.NewPack(bg, plainUser, &PackRequest{Path: d, Format: "tar"})
	var e *wire.Error
	if !errors.As(err, &e) || e.Code != "permission_denied" || e.At != d+"/closed" {
		t.Errorf("got %+v", err)
	}
	p, err := f.NewPack(bg, plainUser, &PackRequest{Path: d, Format: "tar", SkipUnreadable: true})
	must(t, err)
	if p.Skipped != 3 { // the two closed files and the socket
		t.Errorf("skipped %d", p.Skipped)
	}
	p, err = f.NewPack(bg, rootUser, &PackRequest{Path: d, Format: "tar", Include: []string{"*.py"}})
	must(t, err)
	if p.Entries != 1 {
		t.Errorf("entries %d", p.Entries)
	}
	if b := pack(t, f, &PackRequest{Path: d + "/link", Format: "zip"}); !bytes.Contains(b, []byte("a.go")) {
		t.Error("one file, through a link")
	}
	// What shrinks while it is sent cuts the archive.
	must(t, os.WriteFile(d+"/big", make([]byte, 1<<20), 0o644))
	p, err = f.NewPack(bg, rootUser, &PackRequest{Path: d, Format: "tar"})
	must(t, err)
	if err := p.WriteTo(bg, truncating{d + "/big"}); err == nil {
		t.Error("no error")
	}
	for path, want := range map[string]string{d + "/none": "not_found", "/proc": "conflict"} {
		if _, err := f.NewPack(bg, rootUser, &PackRequest{Path: path, Format: "tar"}); code(err) != want {
			t.Errorf("%s: %v", path, err)
		}
	}
}

type truncating struct{ path string }

func (tr truncating) Write(b []byte) (int, error) {
	if len(b) > 50_000 {
		return len(b), os.Truncate(tr.path, 10)
	}
	return len(b), nil
}

// hostile makes a tar archive of entries.
func hostile(entries ...tar.Header) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range entries {
		body := []byte{}
		if h.Typeflag == tar.TypeReg {
			body, h.Size = []byte("evil"), 4
		}
		_ = w.WriteHeader(&h)
		_, _ = w.Write(body)
	}
	_ = w.Close()
	return b.Bytes()
}

func TestNothingLeadsOut(t *testing.T) {
	f, dir := setup(t)
	victim := dir + "/victim"
	must(t, os.WriteFile(victim, []byte("good"), 0o644))
	reg := func(name string) tar.Header { return tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644} }
	sym := func(name, to string) tar.Header {
		return tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to}
	}
	into := dir + "/into"
	must(t, os.MkdirAll(into, 0o755))
	must(t, os.Symlink(dir, into+"/there"))
	for name, b := range map[string][]byte{
		"dots":         hostile(reg("../victim")),
		"inner dots":   hostile(reg("a/../../victim")),
		"absolute":     hostile(reg(victim)),
		"link dir":     hostile(sym("d", dir), reg("d/victim")),
		"link dots":    hostile(sym("d", ".."), reg("d/victim")),
		"on disk":      hostile(reg("there/victim")),
		"dir on disk":  hostile(tar.Header{Name: "there/new/", Typeflag: tar.TypeDir, Mode: 0o777}),
		"hard link":    hostile(tar.Header{Name: "h", Typeflag: tar.TypeLink, Linkname: "../victim"}, reg("h")),
		"hard by link": hostile(tar.Header{Name: "h", Typeflag: tar.TypeLink, Linkname: "there/victim"}, reg("h")),
	} {
		_, err := f.Extract(bg, rootUser, &ExtractRequest{Path: into, Format: "tar"}, bytes.NewReader(b))
		if code(err) != "unsafe_archive" {
			t.Errorf("%s: %v", name, err)
		}
	}
	// A link that stands for a file is replaced, not written through.
	_, err := f.Extract(bg, rootUser, &ExtractRequest{Path: into, Format: "tar"}, bytes.NewReader(hostile(sym("l", victim), reg("l"))))
	must(t, err)
	if read(t, victim) != "good" || read(t, into+"/l") != "evil" {
		t.Error("a link was written through")
	}
	if got := strings.Join(names(t, dir), " "); got != "into u victim" {
		t.Errorf("outside: %s", got)
	}
}

func TestExtractBounds(t *testing.T) {
	f, dir := setup(t)
	reg := func(name string) tar.Header { return tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o4755} }
	b := hostile(reg("top/a"), tar.Header{Name: "top/dev", Typeflag: tar.TypeChar}, tar.Header{Name: "top/p", Typeflag: tar.TypeFifo}, reg("top/b"))
	done, err := f.Extract(bg, rootUser, &ExtractRequest{Path: dir + "/x", Format: "tar", Strip: 1}, bytes.NewReader(b))
	must(t, err)
	if done.Files != 2 || done.Skipped != 2 || len(done.Notices) != 2 || stat(t, dir+"/x/a").Mode&0o7777 != 0o755 {
		t.Errorf("got %+v", done)
	}
	for _, r := range []ExtractRequest{{MaxBytes: 7}, {MaxEntries: 3}} {
		r.Path, r.Format = dir+"/y", "tar"
		_, err := f.Extract(bg, rootUser, &r, bytes.NewReader(b))
		var e *wire.Error
		if !errors.As(err, &e) || e.Code != "too_large" || e.Done.(*Extracted).Files != 1 {
			t.Errorf("%+v: %+v", r, err)
		}
	}
	cut := io.MultiReader(bytes.NewReader(b[:3000]), iotest.ErrReader(wire.BadRequest("body", "cut")))
	if _, err := f.Extract(bg, rootUser, &ExtractRequest{Path: dir + "/z", Format: "tar"}, cut); code(err) != "bad_request" {
		t.Errorf("got %v", err)
	}
	for format, junk := range map[string]string{"tar": strings.Repeat("junk", 300), "tar.gz": "junk", "zip": "junk"} {
		if _, err := f.Extract(bg, rootUser, &ExtractRequest{Path: dir + "/z", Format: format}, strings.NewReader(junk)); code(err) != "bad_archive" {
			t.Errorf("%s: %v", format, err)
		}
	}
	if _, err := f.Extract(bg, plainUser, &ExtractRequest{Path: dir + "/no", Format: "tar"}, bytes.NewReader(b)); code(err) != "permission_denied" {
		t.Errorf("got %v", err)
	}
	_ = filepath.WalkDir(dir, func(path string, _ os.DirEntry, _ error) error {
		if isTemporary(filepath.Base(path)) {
			t.Error("left behind:", path)
		}
		return nil
	})
}

func TestAFullDisk(t *testing.T) {
	f, dir := setup(t)
	small := dir + "/small"
	must(t, os.Mkdir(small, 0o755))
	if err := syscall.Mount("tmpfs", small, "tmpfs", 0, "size=160k"); err != nil {
		t.Skip("needs to mount")
	}
	t.Cleanup(func() { _ = syscall.Unmount(small, 0) })
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, n := range []string{"a", "b", "c"} {
		must(t, w.WriteHeader(&tar.Header{Name: n, Typeflag: tar.TypeReg, Mode: 0o644, Size: 100_000}))
		_, err := w.Write(make([]byte, 100_000))
		must(t, err)
	}
	must(t, w.Close())
	_, err := f.Extract(bg, rootUser, &ExtractRequest{Path: small + "/x", Format: "tar"}, &b)
	var e *wire.Error
	if !errors.As(err, &e) || e.Code != "no_space" || e.Done.(*Extracted).Files != 1 {
		t.Errorf("got %+v", err)
	}
	if got := names(t, small+"/x"); len(got) != 1 {
		t.Errorf("left: %v", got)
	}
	if _, err := f.Copy(bg, rootUser, os.Args[0], small+"/exe", false, false); err == nil {
		t.Error("no error")
	}
}

func FuzzExtract(f *testing.F) {
	fs, dir := &FS{}, f.TempDir()
	f.Add("tar", hostile(tar.Header{Name: "a/b", Typeflag: tar.TypeReg}, tar.Header{Name: "../x", Typeflag: tar.TypeReg}))
	f.Add("tar", hostile(tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: ".."}, tar.Header{Name: "l/x", Typeflag: tar.TypeReg}))
	var z bytes.Buffer
	zw := zip.NewWriter(&z)
	_, _ = zw.Create("../x")
	_, _ = zw.Create("d/")
	_ = zw.Close()
	f.Add("zip", z.Bytes())
	var g bytes.Buffer
	gw := gzip.NewWriter(&g)
	_, _ = gw.Write(hostile(tar.Header{Name: "q", Typeflag: tar.TypeReg}))
	_ = gw.Close()
	f.Add("tar.gz", g.Bytes())
	f.Fuzz(func(t *testing.T, format string, b []byte) {
		into := dir + "/in/to"
		_, _ = fs.Extract(bg, rootUser, &ExtractRequest{Path: into, Format: format, MaxBytes: 1 << 20, MaxEntries: 100}, bytes.NewReader(b))
		if n, _ := os.ReadDir(dir); len(n) != 1 {
			t.Fatalf("something is outside: %v", n)
		}
		if n, _ := os.ReadDir(dir + "/in"); len(n) != 1 {
			t.Fatalf("something is outside: %v", n)
		}
		_ = os.RemoveAll(dir + "/in/to")
	})
}
