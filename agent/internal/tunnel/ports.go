package tunnel

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

const (
	stateListen = "0A"
	// maxPorts bounds the answer.
	maxPorts = 1024
)

// Port is a TCP socket that listens.
type Port struct {
	Port    int    `json:"port"`
	Address string `json:"address"`
	PID     int    `json:"pid,omitempty"`
	Process string `json:"process,omitempty"`

	inode string
}

// Ports are the TCP sockets that listen in the agent's network namespace, by
// port. The process is the one with the lowest number that has the socket
// open; it is missing when there is none any more.
func Ports() []Port {
	var found []Port
	for _, name := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		if f, err := os.Open(name); err == nil {
			found = append(found, parse(f)...)
			_ = f.Close()
		}
	}
	found = found[:min(len(found), maxPorts)]
	owners := owners(found)
	for i := range found {
		if pid, ok := owners[found[i].inode]; ok {
			found[i].PID = pid
			found[i].Process = comm(pid)
		}
	}
	slices.SortFunc(found, func(a, b Port) int {
		return cmp.Or(cmp.Compare(a.Port, b.Port), cmp.Compare(a.Address, b.Address))
	})
	return slices.CompactFunc(found, func(a, b Port) bool { return a.Port == b.Port && a.Address == b.Address })
}

// parse reads a table of the kernel; lines of another form are left out.
func parse(r io.Reader) []Port {
	var found []Port
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		if len(f) < 10 || f[3] != stateListen {
			continue
		}
		if address, ok := parseAddress(f[1]); ok {
			found = append(found, Port{Port: int(address.Port()), Address: address.Addr().String(), inode: f[9]})
		}
	}
	return found
}

// parseAddress reads "0100007F:1F90": words of 32 bits in the order of the
// machine, and the port.
func parseAddress(s string) (netip.AddrPort, bool) {
	host, port, ok := strings.Cut(s, ":")
	number, err := strconv.ParseUint(port, 16, 16)
	b, herr := hex.DecodeString(host)
	if !ok || err != nil || herr != nil || len(b) != 4 && len(b) != 16 {
		return netip.AddrPort{}, false
	}
	for i := 0; i < len(b); i += 4 {
		binary.BigEndian.PutUint32(b[i:], binary.NativeEndian.Uint32(b[i:]))
	}
	address, _ := netip.AddrFromSlice(b)
	return netip.AddrPortFrom(address, uint16(number)), true
}

// owners finds who has the sockets open.
func owners(ports []Port) map[string]int {
	wanted := make(map[string]bool, len(ports))
	for _, p := range ports {
		wanted[p.inode] = true
	}
	found := map[string]int{}
	if len(wanted) == 0 {
		return found
	}
	entries, _ := os.ReadDir("/proc")
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		dir := filepath.Join("/proc", entry.Name(), "fd")
		fds, _ := os.ReadDir(dir)
		for _, fd := range fds {
			target, err := os.Readlink(filepath.Join(dir, fd.Name()))
			if err != nil {
				continue
			}
			inode, ok := strings.CutPrefix(target, "socket:[")
			inode = strings.TrimSuffix(inode, "]")
			if !ok || !wanted[inode] {
				continue
			}
			if have, ok := found[inode]; !ok || pid < have {
				found[inode] = pid
			}
		}
	}
	return found
}

func comm(pid int) string {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "comm"))
	if err != nil {
		return ""
	}
	return strings.ToValidUTF8(string(bytes.TrimSuffix(b, []byte("\n"))), "\uFFFD")
}
