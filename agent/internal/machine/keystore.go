package machine

import (
	"bytes"
	"crypto/sha1"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"path/filepath"
	"time"
	"unicode/utf16"
)

const (
	storeAlias    = "cloche"
	storePassword = "changeit" // what every list of authorities of Java has
	storeMagic    = 0xfeedfeed

	trustedEntry = 2
	privateEntry = 1
)

// stores are where Java has its authorities: what distributions share among
// their JVMs, and what comes with a single one.
var stores = []string{
	"/etc/ssl/certs/java/cacerts",                     // Debian, Alpine
	"/etc/pki/ca-trust/extracted/java/cacerts",        // Fedora
	"/etc/pki/java/cacerts",                           // what the one before is a link to
	"/etc/ca-certificates/extracted/java-cacerts.jks", // Arch
	"/usr/lib/jvm/*/lib/security/cacerts",
	"/usr/lib/jvm/*/jre/lib/security/cacerts",
	"/usr/local/openjdk-*/lib/security/cacerts",
	"/usr/java/*/lib/security/cacerts",
	"/opt/java/*/lib/security/cacerts",
	"/opt/*/lib/security/cacerts",
	"/root/.sdkman/candidates/java/*/lib/security/cacerts",
}

var errStore = errors.New("no key store that is understood")

// setStores makes every JVM that is there trust a certificate (PEM).
func setStores(root, text string) {
	block, _ := pem.Decode([]byte(text))
	if block == nil {
		return
	}
	seen := map[string]bool{}
	for _, pattern := range stores {
		names, _ := filepath.Glob(filepath.Join(root, pattern))
		for _, name := range names {
			path, err := filepath.EvalSymlinks(name)
			if err != nil || seen[path] {
				continue
			}
			seen[path] = true
			trustInStore(path, block.Bytes)
		}
	}
}

// trustInStore adds a certificate to a key store of the form JKS, in place of
// the one that was added before. What is of another form, or has another
// password, is left alone.
func trustInStore(path string, der []byte) {
	f, old := openWhole(path)
	if f == nil {
		return
	}
	defer f.Close()
	made, err := withEntry(old, der)
	if err != nil || bytes.Equal(made, old) {
		return
	}
	same := 12 // after the head, what stays is not written again
	for same < len(old) && same < len(made) && old[same] == made[same] {
		same++
	}
	if _, err := f.WriteAt(made[same:], int64(same)); err != nil {
		return
	}
	_, _ = f.WriteAt(made[:12], 0)
	_ = f.Truncate(int64(len(made)))
}

// withEntry is the store with this certificate as the only one of our name.
func withEntry(old, der []byte) ([]byte, error) {
	if len(old) < 12+sha1.Size || binary.BigEndian.Uint32(old) != storeMagic || binary.BigEndian.Uint32(old[4:]) != 2 {
		return nil, errStore
	}
	body, digest := old[:len(old)-sha1.Size], old[len(old)-sha1.Size:]
	if !bytes.Equal(storeDigest(body), digest) {
		return nil, errStore
	}
	count := binary.BigEndian.Uint32(body[8:])
	r := &storeReader{data: body, at: 12}
	kept, others := append([]byte(nil), body[:12]...), uint32(0)
	for range count {
		from := r.at
		alias, held := r.entry()
		if r.broken {
			return nil, errStore
		}
		if alias == storeAlias {
			if bytes.Equal(held, der) {
				return old, nil
			}
			continue
		}
		kept = append(kept, body[from:r.at]...)
		others++
	}
	if r.at != len(body) {
		return nil, errStore
	}
	binary.BigEndian.PutUint32(kept[8:], others+1)
	kept = binary.BigEndian.AppendUint32(kept, trustedEntry)
	kept = appendText(kept, storeAlias)
	kept = binary.BigEndian.AppendUint64(kept, uint64(time.Now().UnixMilli()))
	kept = appendText(kept, "X.509")
	kept = binary.BigEndian.AppendUint32(kept, uint32(len(der)))
	kept = append(kept, der...)
	return append(kept, storeDigest(kept)...), nil
}

// storeDigest ends a store; it tells damage, and does not protect.
func storeDigest(body []byte) []byte {
	h := sha1.New()
	for _, unit := range utf16.Encode([]rune(storePassword)) {
		h.Write([]byte{byte(unit >> 8), byte(unit)})
	}
	h.Write([]byte("Mighty Aphrodite"))
	h.Write(body)
	return h.Sum(nil)
}

func appendText(to []byte, text string) []byte {
	return append(binary.BigEndian.AppendUint16(to, uint16(len(text))), text...)
}

// storeReader walks over entries; what does not fit makes it broken for good.
type storeReader struct {
	data   []byte
	at     int
	broken bool
}

func (r *storeReader) take(count int) []byte {
	if r.broken || count < 0 || count > len(r.data)-r.at {
		r.broken = true
		return nil
	}
	r.at += count
	return r.data[r.at-count : r.at]
}

func (r *storeReader) number(size int) int {
	value := uint64(0)
	for _, one := range r.take(size) {
		value = value<<8 | uint64(one)
	}
	if value > 1<<31 {
		r.broken = true
		return 0
	}
	return int(value)
}

// entry is the next one: its name, and its certificate if it is one.
func (r *storeReader) entry() (string, []byte) {
	tag := r.number(4)
	alias := string(r.take(r.number(2)))
	r.take(8)
	certificates := 1
	switch tag {
	case trustedEntry:
	case privateEntry:
		r.take(r.number(4))
		certificates = r.number(4)
	default:
		r.broken = true
	}
	var held []byte
	for i := 0; i < certificates && !r.broken; i++ {
		r.take(r.number(2))
		held = r.take(r.number(4))
	}
	if tag != trustedEntry {
		held = nil
	}
	return alias, held
}
