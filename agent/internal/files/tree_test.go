package files

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
)

func TestListOddEntries(t *testing.T) {
	f, dir := setup(t)
	d := dir + "/odd"
	must(t, os.Mkdir(d, 0o755))
	must(t, os.Symlink("nowhere", d+"/broken"))
	must(t, os.Symlink("self", d+"/self"))
	must(t, syscall.Mkfifo(d+"/fifo", 0o600))
	must(t, os.WriteFile(d+"/owned", nil, 0o600))
	must(t, os.Chown(d+"/owned", 54321, 54322))
	for _, n := range []string{"bad\xff\xfename", "new\nline", "🤣", "a b", "50%2Foff", "-rf"} {
		must(t, os.WriteFile(d+"/"+n, nil, 0o4755))
	}
	l, err := f.List(rootUser, d, "", MaxList)
	must(t, err)
	byName := map[string]Entry{}
	for _, e := range l.Entries {
		byName[e.Name] = e
	}
	if len(l.Entries) != 10 || l.Truncated {
		t.Fatalf("got %d entries", len(l.Entries))
	}
	if e := byName["broken"]; e.Type != "symlink" || e.Target == nil || *e.Target != "nowhere" {
		t.Errorf("got %+v", e)
	}
	if e := byName["owned"]; e.Owner != "54321" || e.Group != "54322" || e.Mode != "0600" {
		t.Errorf("got %+v", e)
	}
	if e := byName["fifo"]; e.Type != "fifo" {
		t.Errorf("got %+v", e)
	}
	e, ok := byName["bad\uFFFDname"]
	if raw, err := B64.DecodeString(e.NameB64); !ok || err != nil || string(raw) != "bad\xff\xfename" {
		t.Errorf("got %+v", e)
	}
	for path, want := range map[string]string{dir + "/no": "not_found", d + "/owned": "not_a_directory"} {
		if _, err := f.List(rootUser, path, "", 10); code(err) != want {
			t.Errorf("%s: %v", path, err)
		}
	}
	must(t, os.Chmod(d, 0o700))
	if _, err := f.List(plainUser, d, "", 10); code(err) != "permission_denied" {
		t.Errorf("got %v", err)
	}
	// It may be listed, but what is in it may not be examined.
	must(t, os.Chmod(d, 0o704))
	l, err = f.List(plainUser, d, "", 10)
	must(t, err)
	for _, e := range l.Entries {
		if e.Type != "unknown" {
			t.Errorf("got %+v", e)
		}
	}
}

func TestListPages(t *testing.T) {
	f, dir := setup(t)
	d := dir + "/many"
	must(t, os.Mkdir(d, 0o755))
	var want []string
	for i := range 500 {
		n := fmt.Sprintf("%x", i*7919%500)
		want = append(want, n)
		must(t, os.WriteFile(d+"/"+n, nil, 0o600))
	}
	slices.Sort(want)
	var got []string
	for after := ""; ; {
		l, err := f.List(rootUser, d, after, 37)
		must(t, err)
		for _, e := range l.Entries {
			got = append(got, e.Name)
		}
		if !l.Truncated {
			break
		}
		b, err := B64.DecodeString(l.Next)
		must(t, err)
		after = string(b)
	}
	if !slices.Equal(got, want) {
		t.Errorf("%d of %d, or in another order", len(got), len(want))
	}
}

func TestMkdir(t *testing.T) {
	f, dir := setup(t)
	mode := uint32(0o1777)
	e, created, err := f.Mkdir(plainUser, dir+"/u/x/y", &mode, true)
	must(t, err)
	if !created || e.Type != "dir" || e.Mode != "1777" || e.UID != 54321 || stat(t, dir+"/u/x").Uid != 54321 {
		t.Errorf("got %+v", e)
	}
	if _, created, err = f.Mkdir(plainUser, dir+"/u/x/y", nil, true); created || err != nil {
		t.Errorf("again: %v %v", created, err)
	}
	if _, _, err = f.Mkdir(plainUser, dir+"/u/x/y", nil, false); code(err) != "exists" {
		t.Errorf("again without parents: %v", err)
	}
	if _, _, err = f.Mkdir(plainUser, dir+"/u/no/y", nil, false); code(err) != "not_found" {
		t.Errorf("got %v", err)
	}
	must(t, os.WriteFile(dir+"/file", nil, 0o600))
	if _, _, err = f.Mkdir(rootUser, dir+"/file", nil, true); code(err) != "not_a_directory" {
		t.Errorf("got %v", err)
	}
}

func TestRemove(t *testing.T) {
	f, dir := setup(t)
	must(t, os.MkdirAll(dir+"/t/a/b", 0o755))
	must(t, os.WriteFile(dir+"/t/a/file", nil, 0o600))
	must(t, os.MkdirAll(dir+"/keep", 0o755))
	must(t, os.WriteFile(dir+"/keep/file", nil, 0o600))
	must(t, os.Symlink(dir+"/keep", dir+"/t/link"))
	if err := f.Remove(rootUser, dir+"/t", false); code(err) != "not_empty" {
		t.Errorf("got %v", err)
	}
	if err := f.Remove(plainUser, dir+"/t", true); code(err) != "permission_denied" {
		t.Errorf("got %v", err)
	}
	must(t, f.Remove(rootUser, dir+"/t", true))
	if read(t, dir+"/keep/file") != "" {
		t.Error("a link was followed")
	}
	for _, p := range []string{"/", "/.", "/tmp/.."} {
		if err := f.Remove(rootUser, p, true); code(err) != "bad_request" {
			t.Fatalf("%s: %v", p, err)
		}
	}
	if err := f.Remove(rootUser, dir+"/t", true); code(err) != "not_found" {
		t.Errorf("got %v", err)
	}
}

func TestMove(t *testing.T) {
	f, dir := setup(t)
	shm, err := os.MkdirTemp("/dev/shm", "files")
	if err != nil {
		t.Skip("needs a second file system")
	}
	t.Cleanup(func() { _ = os.RemoveAll(shm) })
	build := func(root string) {
		must(t, os.MkdirAll(root+"/d/e", 0o750))
		must(t, os.WriteFile(root+"/d/e/f", []byte("deep"), 0o640))
		must(t, os.Chown(root+"/d/e/f", 54321, 7))
		must(t, os.Symlink("e/f", root+"/d/l"))
	}
	for _, to := range []string{dir, shm} {
		build(dir)
		e, err := f.Move(rootUser, dir+"/d", to+"/moved", false)
		must(t, err)
		st := stat(t, to+"/moved/e/f")
		if e.Type != "dir" || read(t, to+"/moved/l") != "deep" || st.Uid != 54321 || st.Gid != 7 || st.Mode&0o777 != 0o640 {
			t.Errorf("to %s: %+v, %d:%d %o", to, e, st.Uid, st.Gid, st.Mode)
		}
		if _, err := os.Lstat(dir + "/d"); err == nil {
			t.Error("the old one is still there")
		}
	}
	must(t, os.WriteFile(dir+"/a", []byte("a"), 0o600))
	for _, to := range []string{dir, shm} {
		must(t, os.WriteFile(to+"/b", []byte("b"), 0o600))
		if _, err := f.Move(rootUser, dir+"/a", to+"/b", false); code(err) != "exists" {
			t.Errorf("got %v", err)
		}
	}
	_, err = f.Move(rootUser, dir+"/a", shm+"/b", true)
	must(t, err)
	if read(t, shm+"/b") != "a" {
		t.Error("not overwritten")
	}
	if got := strings.Join(names(t, shm), " "); got != "b moved" {
		t.Errorf("left behind: %s", got)
	}
	if _, err := f.Move(rootUser, dir+"/none", dir+"/x", true); code(err) != "not_found" {
		t.Errorf("got %v", err)
	}
}
