//go:build !linux

package proc

import (
	"net"
	"os/exec"
	"testing"
)

// Port returns a port on 127.0.0.1 that was free just now. Only Linux lets a test keep it.
func Port(t testing.TB) int {
	t.Helper()
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("finding a free port: %v", err)
	}
	defer ln.Close()
	return ln.Addr().(*net.TCPAddr).Port
}

func dieWithParent(*exec.Cmd) {}
