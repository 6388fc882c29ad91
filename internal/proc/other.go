//go:build !linux

package proc

import (
	"errors"
	"net"
	"os/exec"
	"testing"
	"time"
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

// Pids fails the test: processes and their processor time are only counted on Linux.
func (p *Process) Pids() []int {
	p.t.Fatal("the processes of a program are only known on Linux")
	return nil
}

// CPU returns an error: processor time is only known on Linux.
func CPU([]int) (time.Duration, error) { return 0, errors.ErrUnsupported }
