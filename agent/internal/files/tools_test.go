package files

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
)

var bg = context.Background()

// tree is a directory with a bit of everything.
func tree(t *testing.T) (*FS, string) {
	f, dir := setup(t)
	d := dir + "/tree"
	must(t, os.MkdirAll(d+"/src/deep/er", 0o755))
	must(t, os.WriteFile(d+"/src/a.go", []byte("package a\n\nfunc Alpha() {}\n// end"), 0o644))
	must(t, os.WriteFile(d+"/src/deep/b.py", []byte("alpha = 1\r\nbeta = alpha\n"), 0o755))
	must(t, os.WriteFile(d+"/src/deep/er/bin", []byte("alpha\x00alpha"), 0o600))
	must(t, os.WriteFile(d+"/bad\xff\xfe.txt", []byte("alpha beta\n"), 0o644))
	must(t, os.Symlink("src/a.go", d+"/link"))
	must(t, os.Symlink("..", d+"/src/loop"))
	must(t, syscall.Mkfifo(d+"/fifo", 0o644))
	must(t, os.Link(d+"/src/a.go", d+"/src/hard"))
	return f, d
}

// lines gathers what a search emits, as JSON decodes it.
func lines(t *testing.T, run func(Emit) error) (out []map[string]any, end map[string]any) {
	t.Helper()
	must(t, run(func(v any) error {
		b, err := json.Marshal(v)
		must(t, err)
		var m map[string]any
		must(t, json.Unmarshal(b, &m))
		if m["end"] != nil {
			end = m
		} else {
			out = append(out, m)
		}
		return nil
	}))
	return out, end
}

func TestGlob(t *testing.T) {
	f, d := tree(t)
	for pattern, want := range map[string][]string{
		"*":            {"bad\uFFFD.txt", "fifo", "link", "src"},
		"**/*.py":      {"src/deep/b.py"},
		"src/*":        {"src/a.go", "src/deep", "src/hard", "src/loop"},
		"**/{a,b}.*":   {"src/a.go", "src/deep/b.py"},
		"src/**":       {"src/a.go", "src/deep", "src/deep/b.py", "src/deep/er", "src/deep/er/bin", "src/hard", "src/loop"},
		"src/[!a-h]*":  {"src/loop"},
		"s?c/*/b.*":    {"src/deep/b.py"},
		"no/such/**":   nil,
		`src\/a.go`:    {"src/a.go"},
		"src/de**p/b*": {"src/deep/b.py"},
	} {
		found, end := lines(t, func(e Emit) error {
			return f.Glob(bg, plainUser, d, &GlobRequest{Pattern: pattern, Limit: 100}, e)
		})
		var got []string
		for _, m := range found {
			got = append(got, strings.TrimPrefix(m["path"].(string), d+"/"))
		}
		if !slices.Equal(got, want) || end == nil {
			t.Errorf("%s: got %q, want %q", pattern, got, want)
		}
	}
	found, end := lines(t, func(e Emit) error {
		return f.Glob(bg, rootUser, d, &GlobRequest{Pattern: "**", Type: "file", Exclude: []string{"deep"}, Limit: 2}, e)
	})
	if len(found) != 2 || end["truncated"] != true || found[0]["path_b64"] == nil {
		t.Errorf("got %v %v", found, end)
	}
	for _, bad := range []string{"", "/abs", "[", "{a", `x\`, strings.Repeat("x", 5000), "[!/]x["} {
		if err := f.Glob(bg, rootUser, d, &GlobRequest{Pattern: bad, Limit: 1}, nil); code(err) != "bad_request" {
			t.Errorf("%.20q: %v", bad, err)
		}
	}
	if err := f.Glob(bg, rootUser, d+"/no", &GlobRequest{Pattern: "*", Limit: 1}, nil); code(err) != "not_found" {
		t.Errorf("got %v", err)
	}
	if err := f.Glob(bg, rootUser, "/proc", &GlobRequest{Pattern: "*", Limit: 1}, nil); code(err) != "conflict" {
		t.Errorf("got %v", err)
	}
}

func FuzzGlob(f *testing.F) {
	for _, seed := range []string{"**/*.go", "a[!b-]c", "{a,{b,c}}", `\*`, "[]]", "[^]a]", "**/", "é*\xff", "[[:alpha:]]", "[z-a]", "[a-"} {
		f.Add(seed, "a/b.go")
	}
	f.Fuzz(func(t *testing.T, pattern, name string) {
		g, err := compileGlob("pattern", pattern)
		if err != nil {
			if code(err) != "bad_request" {
				t.Fatal(err)
			}
			return
		}
		if g.match(name) && !strings.Contains(name, "/") && !g.mayHold("", 0) && g.depth != 0 {
			t.Errorf("%q matches %q, but nothing is looked for", pattern, name)
		}
		// Nothing but `**` may match across directories.
		if !strings.Contains(pattern, "**") && strings.Count(name, "/") > strings.Count(pattern, "/") && g.match(name) {
			t.Errorf("%q matches %q", pattern, name)
		}
	})
}

func TestGrep(t *testing.T) {
	f, d := tree(t)
	found, end := lines(t, func(e Emit) error {
		return f.Grep(bg, rootUser, d, &GrepRequest{Pattern: "alpha", IgnoreCase: true, Context: 1, Limit: 100}, e)
	})
	var got []string
	for _, m := range found {
		got = append(got, fmt.Sprint(strings.TrimPrefix(m["path"].(string), d+"/"), m["line"], m["column"], m["before"], m["after"]))
	}
	want := []string{
		"bad\uFFFD.txt1 1 [] []", "src/a.go3 6 [] [// end]", "src/deep/b.py1 1 [] [beta = alpha]",
		"src/deep/b.py2 8 [alpha = 1] []", "src/hard3 6 [] [// end]",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	if end["skipped_binary"] != 1.0 || end["truncated"] != false {
		t.Errorf("got %v", end)
	}
	found, end = lines(t, func(e Emit) error {
		return f.Grep(bg, rootUser, d, &GrepRequest{Pattern: ".", Include: []string{"*.py"}, Limit: 1}, e)
	})
	if len(found) != 1 || end["truncated"] != true || found[0]["text"] != "alpha = 1" {
		t.Errorf("got %v %v", found, end)
	}
	found, _ = lines(t, func(e Emit) error {
		return f.Grep(bg, rootUser, d+"/link", &GrepRequest{Pattern: "Alpha() {}", Literal: true, Limit: 9}, e)
	})
	if len(found) != 1 || found[0]["line"] != 3.0 {
		t.Errorf("one file through a link: %v", found)
	}
	for _, bad := range []string{"", "(", strings.Repeat("x", 20000), "((a{100}){100}){100}"} {
		if err := f.Grep(bg, rootUser, d, &GrepRequest{Pattern: bad, Limit: 1}, nil); code(err) != "bad_request" {
			t.Errorf("%.20q: %v", bad, err)
		}
	}
}

func TestGrepOddFiles(t *testing.T) {
	f, dir := setup(t)
	d := dir + "/odd"
	must(t, os.Mkdir(d, 0o755))
	must(t, os.WriteFile(d+"/long", []byte(strings.Repeat("x", 300_000)+"needle\nneedle "+strings.Repeat("y", 5000)), 0o644))
	must(t, os.WriteFile(d+"/closed", []byte("needle"), 0o600))
	found, end := lines(t, func(e Emit) error {
		return f.Grep(bg, plainUser, d, &GrepRequest{Pattern: "needle", Limit: 9}, e)
	})
	if len(found) != 1 || found[0]["line"] != 2.0 || found[0]["cut"] != true || len(found[0]["text"].(string)) != shownLine {
		t.Errorf("got %.300v", found)
	}
	if end["unreadable"] != 1.0 {
		t.Errorf("got %v", end)
	}
	ctx, cancel := context.WithCancel(bg)
	cancel()
	if err := f.Grep(ctx, rootUser, d, &GrepRequest{Pattern: "x", Limit: 1}, nil); err == nil {
		t.Error("a search that nobody waits for goes on")
	}
}

func TestReplace(t *testing.T) {
	f, dir := setup(t)
	a, b := dir+"/u/a", dir+"/u/b"
	must(t, os.WriteFile(a, []byte("one two one"), 0o755))
	must(t, os.Chown(a, 54321, 54321))
	must(t, os.WriteFile(b, []byte("x"), 0o444))
	done, err := f.Replace(bg, plainUser, &ReplaceRequest{Paths: []string{a, b, dir + "/none"}, Pattern: "(o)ne", Replacement: "${1}k$$", DryRun: true})
	must(t, err)
	if done[0].Count != 2 || done[1].Count != 0 || done[2].Error.Code != "not_found" || read(t, a) != "one two one" {
		t.Errorf("got %+v", done)
	}
	done, err = f.Replace(bg, plainUser, &ReplaceRequest{Paths: []string{a}, Pattern: "(o)ne", Replacement: "${1}k$$", MaxCount: 1})
	must(t, err)
	if read(t, a) != "ok$ two one" || done[0].Count != 1 || stat(t, a).Mode&0o777 != 0o755 {
		t.Errorf("got %+v, %q", done, read(t, a))
	}
	done, err = f.Replace(bg, plainUser, &ReplaceRequest{Paths: []string{b}, Pattern: "x", Replacement: "y", Literal: true})
	must(t, err)
	if done[0].Error == nil || done[0].Error.Code != "permission_denied" || read(t, b) != "x" {
		t.Errorf("got %+v", done[0])
	}
	re := regexp.MustCompile("")
	if _, _, err := substitute(make([]byte, maxPlaces+10), re, &ReplaceRequest{Literal: true}); err != syscall.EFBIG {
		t.Errorf("got %v", err)
	}
}

func TestCopyAndLinks(t *testing.T) {
	f, d := tree(t)
	for _, flags := range [][2]bool{{false, false}} {
		if _, err := f.Copy(bg, rootUser, d, d+"2", flags[0], flags[1]); code(err) != "is_directory" {
			t.Errorf("got %v", err)
		}
	}
	_, err := f.Copy(bg, rootUser, d, d+"2", false, true)
	must(t, err)
	if to, _ := os.Readlink(d + "2/link"); to != "src/a.go" || stat(t, d+"2/src/deep/b.py").Mode&0o777 != 0o755 {
		t.Errorf("link to %q", to)
	}
	for path, want := range map[string]string{d + "2": "exists", d + "/src/in": "bad_request", d + "/none/x": "not_found"} {
		if _, err := f.Copy(bg, rootUser, d, path, false, true); code(err) != want {
			t.Errorf("%s: %v", path, err)
		}
	}
	// Holes stay holes.
	must(t, os.WriteFile(d+"/sparse", []byte("head"), 0o644))
	must(t, os.Truncate(d+"/sparse", 1<<30))
	_, err = f.Copy(bg, rootUser, d+"/sparse", d+"/sparse2", false, false)
	must(t, err)
	if st := stat(t, d+"/sparse2"); st.Size != 1<<30 || st.Blocks > 100 {
		t.Errorf("size %d, blocks %d", st.Size, st.Blocks)
	}
	e, err := f.Link(rootUser, d+"/new/sym", "../src\xff", false, false, true)
	must(t, err)
	if to, err := f.Readlink(rootUser, d+"/new/sym"); err != nil || to != "../src\xff" || e.Type != "symlink" {
		t.Errorf("got %q %v", to, err)
	}
	if _, err = f.Link(rootUser, d+"/new/sym", "x", false, false, true); code(err) != "exists" {
		t.Errorf("got %v", err)
	}
	_, err = f.Link(rootUser, d+"/new/sym", d+"/src/a.go", true, true, true)
	must(t, err)
	if stat(t, d+"/new/sym").Ino != stat(t, d+"/src/a.go").Ino {
		t.Error("not the same file")
	}
	if _, err := f.Readlink(rootUser, d); code(err) != "not_a_link" {
		t.Errorf("got %v", err)
	}
}

func TestAttributes(t *testing.T) {
	f, d := tree(t)
	mode, uid, ns := uint32(0o700), uint32(54321), int64(1_000_000_000)
	before := stat(t, d+"/../u").Mtim
	n, e, err := f.SetAttributes(bg, rootUser, d, &Attributes{Mode: &mode, UID: &uid, MtimeNS: &ns, Recursive: true})
	must(t, err)
	if n != 12 || e.UID != 54321 || e.Mode != "0700" || stat(t, d+"/src/deep/b.py").Mtim.Nano() != ns || stat(t, d+"/link").Uid != 54321 {
		t.Errorf("%d changed, %+v", n, e)
	}
	if stat(t, d+"/../u").Mtim != before {
		t.Error("a link was followed")
	}
	if _, _, err := f.SetAttributes(bg, plainUser, d+"/../u/..", &Attributes{Mode: &mode}); code(err) != "permission_denied" {
		t.Errorf("got %v", err)
	}
	if _, created, err := f.Touch(plainUser, d+"/fresh/file", &ns, true); err != nil || !created || stat(t, d+"/fresh/file").Uid != 54321 {
		t.Errorf("got %v", err)
	}
	if _, created, err := f.Touch(plainUser, d+"/fresh/file", nil, true); err != nil || created || stat(t, d+"/fresh/file").Mtim.Nano() == ns {
		t.Errorf("got %v", err)
	}
}

func TestUsage(t *testing.T) {
	f, d := tree(t)
	u, err := f.Du(bg, rootUser, d, 1)
	must(t, err)
	if len(u.Parts) != 1 || u.Parts[0].Path != d+"/src" || u.Entries != 11 || u.Parts[0].Bytes >= u.Bytes {
		t.Errorf("got %+v %+v", u.Use, u.Parts)
	}
	disk, err := f.Df(rootUser, d)
	must(t, err)
	if disk.Bytes < disk.Used || disk.Bytes == 0 {
		t.Errorf("got %+v", disk)
	}
}

func TestCompareAndSwap(t *testing.T) {
	f, dir := setup(t)
	p := dir + "/f"
	w, err := f.Write(rootUser, &Put{Path: p, If: Conditions{Absent: true}}, strings.NewReader("0"))
	must(t, err)
	if _, err := f.Write(rootUser, &Put{Path: p, If: Conditions{Absent: true}}, strings.NewReader("x")); code(err) != "changed" {
		t.Errorf("got %v", err)
	}
	c, err := f.Open(rootUser, p)
	must(t, err)
	c.Close()
	if c.Tag != w.Tag {
		t.Errorf("written as %s, read as %s", w.Tag, c.Tag)
	}
	// Of many with the same condition one is done.
	var wg sync.WaitGroup
	var mu sync.Mutex
	won := 0
	for i := range 20 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			_, err := f.Write(rootUser, &Put{Path: p, If: Conditions{Match: []string{w.Tag}}}, strings.NewReader(fmt.Sprint(i)))
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				won++
			} else if code(err) != "changed" {
				t.Error(err)
			}
		}()
	}
	wg.Wait()
	if won != 1 {
		t.Errorf("%d have won", won)
	}
	if _, err := f.Write(rootUser, &Put{Path: dir + "/none", If: Conditions{Match: []string{"*"}}}, strings.NewReader("")); code(err) != "changed" {
		t.Errorf("got %v", err)
	}
	if got := names(t, dir); len(got) != 2 {
		t.Errorf("left behind: %v", got)
	}
}

func TestRanges(t *testing.T) {
	f, dir := setup(t)
	must(t, os.WriteFile(dir+"/f", []byte("0123456789"), 0o644))
	for r, want := range map[Range]string{{2, 3}: "234", {8, -1}: "89", {8, 100}: "89", {-1, 4}: "6789", {-1, 99}: "0123456789", {10, 1}: "", {-1, 0}: ""} {
		c, err := f.Open(rootUser, dir+"/f")
		must(t, err)
		var out strings.Builder
		if _, err := c.Cut(&r); err != nil {
			if want != "" || code(err) != "range" {
				t.Errorf("%+v: %v", r, err)
			}
		} else {
			must(t, c.CopyTo(&out))
			if out.String() != want {
				t.Errorf("%+v: %q", r, out.String())
			}
		}
		c.Close()
	}
}
