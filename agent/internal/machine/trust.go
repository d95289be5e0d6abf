package machine

import (
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"cloche.dev/agent/internal/wire"
)

const (
	blockBegin = "# cloche: authority of the workspace\n"
	blockEnd   = "# cloche: end\n"

	// largestPEM is more than any certificate needs.
	largestPEM = 16 << 10
	// largestBundle is more than any distribution has.
	largestBundle = 8 << 20
)

// bundles are where programs look for all authorities in one file.
var bundles = []string{
	"/etc/ssl/certs/ca-certificates.crt",                // Debian, Alpine, Arch
	"/etc/pki/tls/certs/ca-bundle.crt",                  // Fedora
	"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", // what the one before is a link to
	"/etc/ssl/ca-bundle.pem",                            // openSUSE
	"/etc/pki/tls/cacert.pem",
	"/etc/ssl/cert.pem", // Alpine, and what OpenSSL takes by itself
}

// sources are what a distribution makes its bundle of when asked to.
var sources = []string{
	"/usr/local/share/ca-certificates",
	"/etc/pki/ca-trust/source/anchors",
	"/etc/ca-certificates/trust-source/anchors",
}

// checkPEM refuses what is not exactly one certificate in PEM.
func checkPEM(text string) error {
	if len(text) <= largestPEM {
		block, rest := pem.Decode([]byte(text))
		if block != nil && block.Type == "CERTIFICATE" && strings.TrimSpace(string(rest)) == "" &&
			strings.HasPrefix(text, "-----BEGIN ") {
			return nil
		}
	}
	return wire.BadRequest("ca_pem", "want one certificate in PEM")
}

// setAuthority makes programs below root trust a certificate. A file that is
// odd, missing or cannot be written is left alone: what does not trust it
// fails by itself, and says so.
func setAuthority(root, text string) error {
	text = strings.TrimSpace(text) + "\n"
	own := filepath.Join(root, "/etc/cloche")
	_ = os.MkdirAll(own, 0o755)
	file := filepath.Join(own, "ca.pem")
	_ = setContent(file, text)
	whole := ""
	seen := map[string]bool{}
	for _, name := range bundles {
		path, err := filepath.EvalSymlinks(filepath.Join(root, name))
		if err != nil || seen[path] {
			continue
		}
		seen[path] = true
		if trustIn(path, text) && whole == "" {
			whole = path
		}
	}
	if whole == "" {
		whole = file
	}
	// A link, because a copy would cost every sandbox the bundle once more.
	link := filepath.Join(own, "ca-bundle.pem")
	if now, err := os.Readlink(link); err != nil || now != whole {
		_ = os.Remove(link)
		_ = os.Symlink(whole, link)
	}
	for _, name := range sources {
		dir := filepath.Join(root, name)
		if st, err := os.Stat(dir); err == nil && st.IsDir() {
			_ = setContent(filepath.Join(dir, "cloche.crt"), text)
		}
	}
	linkSource(root)
	setStores(root, text)
	return nil
}

// linkSource makes the link that Debian's update-ca-certificates would make of
// its source: a JVM that is installed later takes its authorities from there.
func linkSource(root string) {
	const source = "/usr/local/share/ca-certificates/cloche.crt"
	link := filepath.Join(root, "/etc/ssl/certs/cloche.pem")
	if _, err := os.Stat(filepath.Join(root, source)); err == nil {
		_ = os.Symlink(source, link) // one that is there already stays
	}
}

// openWhole opens a plain file that is not too large, and reads it; nil if it
// is something else.
func openWhole(path string) (*os.File, []byte) {
	fd, err := syscall.Open(path, syscall.O_RDWR|syscall.O_NOFOLLOW|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil
	}
	f := os.NewFile(uintptr(fd), path)
	st, err := f.Stat()
	if err != nil || !st.Mode().IsRegular() || st.Size() > largestBundle {
		f.Close()
		return nil, nil
	}
	whole := make([]byte, st.Size())
	if _, err := f.ReadAt(whole, 0); err != nil {
		f.Close()
		return nil, nil
	}
	return f, whole
}

// trustIn adds a certificate to a bundle, in place of the one that was added
// before; false if it is not in there now.
func trustIn(path, text string) bool {
	f, old := openWhole(path)
	if f == nil {
		return false
	}
	defer f.Close()
	added, from := withBlock(string(old), text)
	if added == "" {
		return true
	}
	// What stays is not written again: under emulation, and on the disk, that
	// would cost more than all else in a renewal.
	if _, err := f.WriteAt([]byte(added), int64(from)); err != nil {
		return false
	}
	return f.Truncate(int64(from+len(added))) == nil
}

// withBlock says what has to stand from which place of a bundle to its end;
// nothing if it is right as it is.
func withBlock(old, text string) (string, int) {
	rest, from := old, len(old)
	if begin := strings.Index(old, blockBegin); begin >= 0 {
		end := strings.Index(old[begin:], blockEnd)
		if end < 0 {
			// Cut off by a crash: what follows is ours.
			end = len(old) - begin - len(blockEnd)
		}
		if old[begin:begin+end+len(blockEnd)] == blockBegin+text+blockEnd {
			return "", 0
		}
		from = begin
		rest = old[begin+end+len(blockEnd):]
	} else {
		if strings.Contains(old, text) {
			return "", 0
		}
		rest = ""
		if old != "" && !strings.HasSuffix(old, "\n") {
			rest = "\n"
		}
	}
	return rest + blockBegin + text + blockEnd, from
}
