package sys

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"syscall"
	"unsafe"
)

const (
	netlinkSockDiag  = 4
	sockDiagByFamily = 20
	sockDestroy      = 21
	tcpListen        = 10

	diagRequestSize = 56 // struct inet_diag_req_v2
	diagIDOffset    = 8  // of its struct inet_diag_sockid
	diagIDSize      = 48
	diagMsgIDOffset = 4 // of the same in struct inet_diag_msg
)

// CutTCP destroys every TCP connection of this machine whose other end is
// another one, and returns how many there were. Whoever waits on them gets
// ECONNABORTED at once.
func CutTCP() (int, error) {
	fd, err := syscall.Socket(syscall.AF_NETLINK, syscall.SOCK_RAW|syscall.SOCK_CLOEXEC, netlinkSockDiag)
	if err != nil {
		return 0, err
	}
	defer func() { _ = syscall.Close(fd) }()
	cut := 0
	for _, family := range []byte{syscall.AF_INET, syscall.AF_INET6} {
		ids, err := connections(fd, family)
		if err != nil {
			return cut, err
		}
		for _, id := range ids {
			// One that has ended meanwhile is as good.
			if diagRequest(fd, sockDestroy, syscall.NLM_F_ACK, family, id) == nil && acknowledged(fd) == nil {
				cut++
			}
		}
	}
	return cut, nil
}

func connections(fd int, family byte) ([][]byte, error) {
	if err := diagRequest(fd, sockDiagByFamily, syscall.NLM_F_DUMP, family, nil); err != nil {
		return nil, err
	}
	var ids [][]byte
	buf := make([]byte, 64<<10)
	for {
		messages, err := receive(fd, buf)
		if err != nil {
			return nil, err
		}
		for _, m := range messages {
			switch m.Header.Type {
			case syscall.NLMSG_DONE:
				return ids, nil
			case syscall.NLMSG_ERROR:
				return nil, netlinkError(m.Data)
			}
			if id := foreign(m.Data, family); id != nil {
				ids = append(ids, id)
			}
		}
	}
}

// foreign is the identity of the connection that data describes, nil if both
// its ends are here.
func foreign(data []byte, family byte) []byte {
	if len(data) < diagMsgIDOffset+diagIDSize {
		return nil
	}
	id := data[diagMsgIDOffset : diagMsgIDOffset+diagIDSize]
	var remote netip.Addr
	if family == syscall.AF_INET {
		remote = netip.AddrFrom4([4]byte(id[20:24]))
	} else {
		remote = netip.AddrFrom16([16]byte(id[20:36])).Unmap()
	}
	if remote.IsLoopback() || remote.IsUnspecified() {
		return nil
	}
	return append([]byte(nil), id...)
}

// diagRequest asks for one socket, or without id for all that do not listen.
func diagRequest(fd int, kind, flags uint16, family byte, id []byte) error {
	b := make([]byte, syscall.NLMSG_HDRLEN+diagRequestSize)
	binary.NativeEndian.PutUint32(b[0:], uint32(len(b)))
	binary.NativeEndian.PutUint16(b[4:], kind)
	binary.NativeEndian.PutUint16(b[6:], syscall.NLM_F_REQUEST|flags)
	body := b[syscall.NLMSG_HDRLEN:]
	body[0], body[1] = family, syscall.IPPROTO_TCP
	binary.NativeEndian.PutUint32(body[4:], ^uint32(1<<tcpListen))
	copy(body[diagIDOffset:], id)
	return syscall.Sendto(fd, b, 0, &syscall.SockaddrNetlink{Family: syscall.AF_NETLINK})
}

func acknowledged(fd int) error {
	messages, err := receive(fd, make([]byte, 4096))
	if err != nil {
		return err
	}
	for _, m := range messages {
		if m.Header.Type == syscall.NLMSG_ERROR {
			return netlinkError(m.Data)
		}
	}
	return errors.New("no answer of the kernel")
}

func receive(fd int, buf []byte) ([]syscall.NetlinkMessage, error) {
	n, _, err := syscall.Recvfrom(fd, buf, 0)
	if err != nil {
		return nil, err
	}
	return syscall.ParseNetlinkMessage(buf[:n])
}

func netlinkError(data []byte) error {
	if len(data) < int(unsafe.Sizeof(int32(0))) {
		return syscall.EINVAL
	}
	return errno(syscall.Errno(-int32(binary.NativeEndian.Uint32(data))))
}
