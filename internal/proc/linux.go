//go:build linux

package proc

import (
	"os/exec"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// Port returns a port on 127.0.0.1 that nobody else gets until the test ends, also while the server that the test
// starts on it is down.
//
// To find a free port by listening and closing is not enough: the next listener, or a connection that goes out, may get
// the same one, and two Caddys on one port do not even fail, they share it (SO_REUSEPORT). So a socket stays bound to
// the port without listening. The kernel then gives the port to nobody who asks for any, but lets in who asks for
// just this one with the options that servers set.
func Port(t testing.TB) int {
	t.Helper()
	fd, port, err := hold()
	if err != nil {
		t.Fatalf("finding a free port: %v", err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	return port
}

func hold() (fd, port int, err error) {
	fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, 0, err
	}
	port, err = bind(fd)
	if err != nil {
		_ = unix.Close(fd)
	}
	return fd, port, err
}

func bind(fd int) (port int, err error) {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		return 0, err
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
		return 0, err
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return 0, err
	}
	addr, err := unix.Getsockname(fd)
	if err != nil {
		return 0, err
	}
	return addr.(*unix.SockaddrInet4).Port, nil
}

// dieWithParent lets the kernel kill the program when the test binary is gone without having run its cleanups, as after
// a panic or a test timeout.
func dieWithParent(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
