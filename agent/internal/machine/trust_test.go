package machine

import (
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func certificate(content string) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte(content)}))
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestCheckPEM(t *testing.T) {
	good := certificate("a")
	for _, text := range []string{good, good + "\n", strings.TrimSpace(good)} {
		if err := checkPEM(text); err != nil {
			t.Errorf("%q: %v", text, err)
		}
	}
	key := strings.ReplaceAll(good, "CERTIFICATE", "PRIVATE KEY")
	for _, text := range []string{"x", good + good, "x\n" + good, good + "x", key, certificate(strings.Repeat("a", largestPEM))} {
		if checkPEM(text) == nil {
			t.Errorf("%q was accepted", text)
		}
	}
}

func TestAuthorityIsAddedOnceAndReplaced(t *testing.T) {
	root := t.TempDir()
	first, second, public := certificate("first"), certificate("second"), certificate("public")
	debian := root + "/etc/ssl/certs/ca-certificates.crt"
	write(t, debian, public)
	write(t, root+"/etc/pki/tls/cacert.pem", strings.TrimSpace(public))
	if err := os.Symlink("certs/ca-certificates.crt", root+"/etc/ssl/cert.pem"); err != nil {
		t.Fatal(err)
	}
	write(t, root+"/usr/local/share/ca-certificates/mine.crt", public)
	expect := func(path, want string) {
		t.Helper()
		if got, err := os.ReadFile(root + path); err != nil || string(got) != want {
			t.Errorf("%s: %v\n%s", path, err, got)
		}
	}
	for _, text := range []string{first, first, second, second, first} {
		if err := setAuthority(root, text); err != nil {
			t.Fatal(err)
		}
		block := blockBegin + text + blockEnd
		expect("/etc/ssl/certs/ca-certificates.crt", public+block)
		expect("/etc/pki/tls/cacert.pem", public+block)
		expect("/etc/cloche/ca.pem", text)
		expect("/etc/cloche/ca-bundle.pem", public+block)
		expect("/usr/local/share/ca-certificates/cloche.crt", text)
		if to, err := os.Readlink(root + "/etc/ssl/certs/cloche.pem"); to != "/usr/local/share/ca-certificates/cloche.crt" {
			t.Error(to, err)
		}
	}
	if st, err := os.Lstat(root + "/etc/ssl/cert.pem"); err != nil || st.Mode()&os.ModeSymlink == 0 {
		t.Error("a link was replaced")
	}
	// The user adds one of their own behind ours, and the distribution makes its bundle anew.
	write(t, debian, public+blockBegin+first+blockEnd+second)
	_ = setAuthority(root, certificate("third"))
	expect("/etc/ssl/certs/ca-certificates.crt", public+second+blockBegin+certificate("third")+blockEnd)
	write(t, debian, public+first)
	_ = setAuthority(root, first)
	expect("/etc/ssl/certs/ca-certificates.crt", public+first)
	write(t, debian, public+blockBegin+first[:20])
	_ = setAuthority(root, first)
	expect("/etc/ssl/certs/ca-certificates.crt", public+blockBegin+first+blockEnd)
}

func TestAuthorityWithoutAnyBundle(t *testing.T) {
	root := t.TempDir()
	_ = setAuthority(root, certificate("a"))
	if got, _ := os.ReadFile(root + "/etc/cloche/ca-bundle.pem"); string(got) != certificate("a") {
		t.Errorf("%q", got)
	}
}

func TestOddFilesAreLeftAlone(t *testing.T) {
	root := t.TempDir()
	if err := os.MkdirAll(root+"/etc/ssl/certs/ca-certificates.crt", 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, root+"/etc/cloche", "a file where a directory should be")
	write(t, root+"/usr/local/share/ca-certificates", "too")
	if err := os.MkdirAll(root+"/etc/pki/tls", 0o755); err != nil {
		t.Fatal(err)
	}
	for _, link := range []string{"/etc/pki/tls/cacert.pem", "/etc/ssl/cert.pem"} {
		if err := os.Symlink(root+link, root+link); err != nil {
			t.Fatal(err)
		}
	}
	huge := root + "/etc/ssl/ca-bundle.pem"
	write(t, huge, "")
	if err := os.Truncate(huge, largestBundle+1); err != nil {
		t.Fatal(err)
	}
	if err := setAuthority(root, certificate("a")); err != nil {
		t.Error(err)
	}
	if st, _ := os.Stat(huge); st.Size() != largestBundle+1 {
		t.Error("a file that cannot be a bundle was changed")
	}
}

func FuzzWithBlock(f *testing.F) {
	text := certificate("a")
	for _, old := range []string{"", "x", text, blockBegin, blockEnd + blockBegin, blockBegin + text + blockEnd + "x"} {
		f.Add(old)
	}
	f.Fuzz(func(t *testing.T, old string) {
		added, from := withBlock(old, text)
		if added == "" {
			if !strings.Contains(old, text) {
				t.Fatal("the certificate is not in there")
			}
			return
		}
		made := old[:from] + added
		if !strings.HasSuffix(made, blockBegin+text+blockEnd) {
			t.Fatalf("%q", made)
		}
		if again, _ := withBlock(made, text); again != "" && strings.Count(made, blockBegin) == 1 {
			t.Fatalf("%q is not the end of it: %q", made, again)
		}
	})
}
