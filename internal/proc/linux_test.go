//go:build linux

package proc

import (
	"fmt"
	"net"
	"testing"
)

// Nobody who asks for any port, listening or going out, may get one that a test holds; a server that asks for just
// that one may, again and again.
func TestPortIsKept(t *testing.T) {
	held := make(map[int]bool)
	for range 500 {
		port := Port(t)
		if held[port] {
			t.Fatalf("port %d was given out twice", port)
		}
		held[port] = true
	}
	for range 500 {
		ln, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ln.Close() })
		if port := ln.Addr().(*net.TCPAddr).Port; held[port] {
			t.Fatalf("port %d is held and was given to a listener", port)
		}
	}
	for port := range held {
		for range 2 {
			ln, err := net.Listen("tcp4", fmt.Sprintf("127.0.0.1:%d", port))
			if err != nil {
				t.Fatalf("the server cannot listen: %v", err)
			}
			ln.Close()
		}
	}
}
