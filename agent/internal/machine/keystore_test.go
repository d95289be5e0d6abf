package machine

import (
	"bytes"
	"encoding/binary"
	"encoding/pem"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// emptyStore is what Java would write without any entry.
func emptyStore() []byte {
	head := binary.BigEndian.AppendUint32(nil, storeMagic)
	head = binary.BigEndian.AppendUint32(head, 2)
	head = binary.BigEndian.AppendUint32(head, 0)
	return append(head, storeDigest(head)...)
}

func der(t *testing.T, name string) []byte {
	t.Helper()
	block, _ := pem.Decode([]byte(certificate(name)))
	if block == nil {
		t.Fatal("no certificate")
	}
	return block.Bytes
}

func TestStoreHoldsOneEntryOfOurs(t *testing.T) {
	first, second := der(t, "first"), der(t, "second")
	one, err := withEntry(emptyStore(), first)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := withEntry(one, first); err != nil || !bytes.Equal(again, one) {
		t.Error("it was written once more", err)
	}
	two, err := withEntry(one, second)
	if err != nil || bytes.Contains(two, first) || !bytes.Contains(two, second) {
		t.Error("the one before was not replaced", err)
	}
	if count := binary.BigEndian.Uint32(two[8:]); count != 1 {
		t.Error("entries:", count)
	}
}

func TestStoreThatIsOddIsLeftAlone(t *testing.T) {
	good, _ := withEntry(emptyStore(), der(t, "first"))
	resealed := func(change func([]byte) []byte) []byte {
		body := change(append([]byte(nil), good[:len(good)-20]...))
		return append(body, storeDigest(body)...)
	}
	odd := map[string][]byte{
		"nothing":           nil,
		"another form":      []byte(strings.Repeat("0", 100)),
		"another password":  append(append([]byte(nil), good[:len(good)-1]...), good[len(good)-1]^1),
		"more than it says": resealed(func(b []byte) []byte { return append(b, 0) }),
		"less than it says": resealed(func(b []byte) []byte { b[11] = 200; return b }),
		"unknown entry":     resealed(func(b []byte) []byte { b[15] = 9; return b }),
		"long length":       resealed(func(b []byte) []byte { b[16] = 0xff; return b }),
	}
	for name, data := range odd {
		if _, err := withEntry(data, der(t, "second")); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
}

func FuzzStore(f *testing.F) {
	f.Add([]byte{0, 0, 0, 2, 0, 1, 'a'})
	f.Fuzz(func(t *testing.T, entries []byte) {
		body := append(emptyStore()[:11], 1)
		body = append(body, entries...)
		_, _ = withEntry(append(body, storeDigest(body)...), []byte("certificate"))
	})
}

func TestJavaReadsTheStore(t *testing.T) {
	keytool, err := exec.LookPath("keytool")
	if err != nil {
		t.Skip("there is no Java here")
	}
	root := t.TempDir()
	shared := root + "/etc/ssl/certs/java/cacerts"
	own := root + "/opt/java/openjdk/lib/security/cacerts"
	linked := root + "/usr/lib/jvm/java-17/lib/security/cacerts"
	run := func(store string, more ...string) string {
		t.Helper()
		out, err := exec.Command(keytool, append(more, "-keystore", store, "-storepass", "changeit")...).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	for _, path := range []string{shared, own, linked} {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	run(shared, "-genkeypair", "-alias", "theirs", "-keyalg", "EC", "-dname", "CN=theirs", "-storetype", "JKS", "-keypass", "changeit")
	theirs := run(shared, "-exportcert", "-rfc", "-alias", "theirs")
	write(t, root+"/theirs.pem", theirs)
	run(shared, "-importcert", "-noprompt", "-alias", "trusted", "-file", root+"/theirs.pem", "-storetype", "JKS")
	data, err := os.ReadFile(shared)
	if err != nil {
		t.Fatal(err)
	}
	write(t, own, string(data))
	if err := os.Symlink(shared, linked); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{theirs, theirs} {
		_ = setAuthority(root, text)
		for _, path := range []string{shared, own} {
			listed := run(path, "-list")
			for _, want := range []string{"3 entries", "cloche, ", "theirs, ", "trusted, "} {
				if !strings.Contains(listed, want) {
					t.Errorf("%s: no %q in %s", path, want, listed)
				}
			}
		}
	}
	if st, err := os.Lstat(linked); err != nil || st.Mode()&os.ModeSymlink == 0 {
		t.Error("a link was replaced")
	}
}
