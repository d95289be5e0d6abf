package users

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

const passwd = `root:x:0:0:root:/root:/bin/bash
# comment:x:1:1::/:/bin/sh
broken line
daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin
u:x:1000:1000:A User,,,:/home/u:/bin/sh
toobig:x:4294967295:1::/:/bin/sh
+nis::::::
neg:x:-1:0::/:/bin/sh
twin:x:1000:2000::/home/twin:/bin/zsh
`

const groups = `root:x:0:
daemon:x:1:
docker:x:999:u,other
u:x:1000:
wheel:x:10:u, x
bad:x:abc:u
short:x:5
`

func db(t *testing.T) *DB {
	t.Helper()
	dir := t.TempDir()
	p, g := filepath.Join(dir, "passwd"), filepath.Join(dir, "group")
	for path, s := range map[string]string{p: passwd, g: groups} {
		if err := os.WriteFile(path, []byte(s), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return New(p, g)
}

func TestResolve(t *testing.T) {
	d := db(t)
	tests := []struct {
		spec string
		want *Identity
	}{
		{"", &Identity{0, 0, []uint32{0}, "root", "/root", "/bin/bash"}},
		{"u", &Identity{1000, 1000, []uint32{1000, 999, 10}, "u", "/home/u", "/bin/sh"}},
		{"1000", &Identity{1000, 1000, []uint32{1000, 999, 10}, "u", "/home/u", "/bin/sh"}},
		{"u:docker", &Identity{1000, 999, []uint32{999, 10}, "u", "/home/u", "/bin/sh"}},
		{"u:5555", &Identity{1000, 5555, []uint32{5555, 999, 10}, "u", "/home/u", "/bin/sh"}},
		{"54321", &Identity{54321, 0, []uint32{0}, "54321", "/", ""}},
		{"54321:7", &Identity{54321, 7, []uint32{7}, "54321", "/", ""}},
		{"nobody", nil},
		{"u:nogroup", nil},
		{"toobig", nil},
		{"4294967295", nil},
		{":", nil},
		{"neg", nil},
	}
	for _, tt := range tests {
		got, err := d.Resolve(tt.spec)
		if (err == nil) != (tt.want != nil) || !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%q: got %+v, %v", tt.spec, got, err)
		}
	}
}

func TestNamesAndChange(t *testing.T) {
	d := db(t)
	if _, err := d.Resolve("new"); err == nil {
		t.Fatal("there is no such user yet")
	}
	if got := d.UserName(1000); got != "u" {
		t.Errorf("the first entry of a number has its name, got %q", got)
	}
	if got := d.GroupName(77); got != "77" {
		t.Error(got)
	}
	if err := os.WriteFile(d.passwdPath, []byte(passwd+"new:x:7:7::/n:/bin/sh\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if id, err := d.Resolve("new"); err != nil || id.UID != 7 {
		t.Errorf("after the change: %+v, %v", id, err)
	}
}

func TestImageWithoutPasswd(t *testing.T) {
	d := New("/nonexistent/passwd", "/nonexistent/group")
	id, err := d.Resolve("root")
	if err != nil || id.UID != 0 || id.Home != "/root" {
		t.Errorf("got %+v, %v", id, err)
	}
}

func TestEnvironmentFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "environment")
	text := "A=1\n# no\nexport B=\"two words\"\nC='x'\nbroken\n=y\nD=$A `id`\n E = f\nF=a=b"
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	e := Environment{Path: path}
	want := [][2]string{{"A", "1"}, {"B", "two words"}, {"C", "x"}, {"D", "$A `id`"}, {"E", " f"}, {"F", "a=b"}}
	if got := e.Vars(); !reflect.DeepEqual(got, want) {
		t.Errorf("got %q", got)
	}
}

func FuzzPasswd(f *testing.F) {
	f.Add(passwd, groups)
	f.Add("a:b:1:2:3:4:5", "g::1:a,b")
	f.Fuzz(func(t *testing.T, p, g string) {
		for _, e := range parsePasswd(p) {
			if e.name == "" || e.uid == 1<<32-1 || e.gid == 1<<32-1 {
				t.Fatalf("bad entry %+v", e)
			}
		}
		for _, e := range parseGroup(g) {
			if e.name == "" || e.gid == 1<<32-1 {
				t.Fatalf("bad group %+v", e)
			}
		}
		for _, kv := range parseEnvironment(p) {
			if kv[0] == "" {
				t.Fatalf("bad assignment %q", kv)
			}
		}
	})
}
