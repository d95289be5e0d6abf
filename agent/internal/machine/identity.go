package machine

import (
	"os"
	"strings"
	"syscall"
)

func setHostname(name string) error {
	if err := syscall.Sethostname([]byte(name)); err != nil {
		return err
	}
	_ = os.MkdirAll("/etc", 0o755)
	if err := setContent("/etc/hostname", name+"\n"); err != nil {
		return err
	}
	return setContent("/etc/hosts", hostsWith(contentOf("/etc/hosts"), name))
}

// hostsWith gives /etc/hosts one line for our own name; the rest stays.
func hostsWith(old, name string) string {
	const address = "127.0.1.1"
	var b strings.Builder
	done := false
	for line := range strings.Lines(old) {
		f := strings.Fields(line)
		if len(f) > 0 && f[0] == address {
			if !done {
				b.WriteString(address + "\t" + name + "\n")
				done = true
			}
			continue
		}
		b.WriteString(line)
		if !strings.HasSuffix(line, "\n") {
			b.WriteByte('\n')
		}
	}
	if b.Len() == 0 {
		b.WriteString("127.0.0.1\tlocalhost\n::1\tlocalhost\n")
	}
	if !done {
		b.WriteString(address + "\t" + name + "\n")
	}
	return b.String()
}

func setMachineID(id string) error {
	_ = os.MkdirAll("/etc", 0o755)
	if err := setContent("/etc/machine-id", id+"\n"); err != nil {
		return err
	}
	const dbus = "/var/lib/dbus/machine-id"
	if st, err := os.Lstat(dbus); err == nil && st.Mode().IsRegular() {
		return setContent(dbus, id+"\n")
	}
	return nil
}
