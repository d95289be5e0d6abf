package machine

import (
	"encoding/binary"
	"os"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"cloche.dev/agent/internal/sys"
)

const (
	rndAddEntropy  = 0x40085203
	rndReseedCRNG  = 0x5207
	ext4ResizeFS   = 0x40086610
	rootDeviceSize = "/sys/class/block/vda/size"
)

// addEntropy mixes fresh bytes into the kernel's pool, with full credit, and
// makes the generator use them at once. Two forks of one snapshot must not
// share a single random number.
func addEntropy(b []byte) error {
	f, err := os.OpenFile("/dev/urandom", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	// struct rand_pool_info: bits of credit, size, bytes.
	info := make([]byte, 8, 8+len(b))
	binary.NativeEndian.PutUint32(info[0:], uint32(len(b)*8))
	binary.NativeEndian.PutUint32(info[4:], uint32(len(b)))
	info = append(info, b...)
	fd := int(f.Fd())
	if err := sys.Ioctl(fd, rndAddEntropy, unsafe.Pointer(&info[0])); err != nil {
		return err
	}
	return sys.IoctlInt(fd, rndReseedCRNG, 0)
}

// growDisk lets the root file system fill its disk. The virtio driver has
// taken notice of the new size already.
func growDisk() error {
	b, err := os.ReadFile(rootDeviceSize)
	if err != nil {
		return err
	}
	sectors, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 63)
	if err != nil {
		return err
	}
	var st syscall.Statfs_t
	if err := syscall.Statfs("/", &st); err != nil {
		return err
	}
	blocks := sectors * 512 / uint64(st.Bsize)
	root, err := os.Open("/")
	if err != nil {
		return err
	}
	defer root.Close()
	return sys.Ioctl(int(root.Fd()), ext4ResizeFS, unsafe.Pointer(&blocks))
}
