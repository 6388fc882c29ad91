package redistest

import (
	"bytes"
	"context"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-tollgate/ratelimit/internal/proc"
)

func TestProxyForwardsAndCounts(t *testing.T) {
	t.Parallel()
	s := Start(t)
	p := NewProxy(t, s.Addr())
	client := connect(t, p.URL())
	ping(t, client)
	before := p.Requests()
	value := bytes.Repeat([]byte("*1\r\n"), 50_000) // looks like headers, and takes many chunks
	if err := client.Set(t.Context(), "a", value, 0).Err(); err != nil {
		t.Fatal(err)
	}
	got, err := client.Get(t.Context(), "a").Bytes()
	if err != nil || !bytes.Equal(got, value) {
		t.Errorf("get: %d bytes, error %v; want what was set, %d bytes", len(got), err, len(value))
	}
	if n := p.Requests() - before; n != 2 {
		t.Errorf("requests: got %d, want 2", n)
	}
	if p.Conns() != 1 || p.OpenConns() != 1 {
		t.Errorf("connections: got %d, %d of them open; want 1, 1", p.Conns(), p.OpenConns())
	}
	if up, down := p.Bytes(); up < int64(len(value)) || down < int64(len(value)) {
		t.Errorf("bytes: got %d and %d, want at least %d in each direction", up, down, len(value))
	}
}

func TestProxyDelaysEachDirection(t *testing.T) {
	t.Parallel()
	p := NewProxy(t, Start(t).Addr())
	client := connect(t, p.URL())
	ping(t, client)
	const delay = 30 * time.Millisecond
	p.SetDelay(delay)
	start := time.Now()
	ping(t, client)
	if took := time.Since(start); took < 2*delay {
		t.Errorf("a round trip took %v, want at least %v", took, 2*delay)
	}
	p.SetDelay(0)
	ping(t, client)
}

// A delay is distance, not a bottleneck: a hundred requests written one after the other arrive a delay later, not a
// hundred delays.
func TestProxyDelayDoesNotAddUp(t *testing.T) {
	t.Parallel()
	s := Start(t)
	p := NewProxy(t, s.Addr())
	p.SetDelay(100 * time.Millisecond)
	conn := dial(t, p)
	start := time.Now()
	for sent := 1; sent <= 100; sent++ {
		if _, err := conn.Write([]byte("*2\r\n$4\r\nINCR\r\n$1\r\nn\r\n")); err != nil {
			t.Fatal(err)
		}
		proc.Eventually(t, "the proxy has it", func() bool { return p.Requests() == sent })
	}
	// The server counts a call, so it has the request, not only the proxy.
	proc.Eventually(t, "all arrived", func() bool { return s.Calls("incr") == 100 })
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("100 requests took %v: the delays add up", took)
	}
}

func TestProxyLosesRepliesOfExecutedRequests(t *testing.T) {
	t.Parallel()
	s := Start(t)
	p := NewProxy(t, s.Addr())
	client := connect(t, p.URL())
	ping(t, client)
	p.DropReplies(true)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := client.Incr(ctx, "n").Err(); err == nil {
		t.Error("a reply came through")
	}
	if got := s.Do("get", "n"); got != "1" {
		t.Errorf("n: got %v, want 1: the request was executed", got)
	}
	p.DropReplies(false)
	ping(t, client)
}

func TestProxyCutsConnections(t *testing.T) {
	t.Parallel()
	p := NewProxy(t, Start(t).Addr())
	conn := dial(t, p)
	p.Cut()
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("a cut connection was read from")
	}
	proc.Eventually(t, "the proxy has no connection", func() bool { return p.OpenConns() == 0 })
	ping(t, connect(t, p.URL()))
	if p.Conns() != 2 {
		t.Errorf("connections: got %d, want 2", p.Conns())
	}
}

func TestProxyRefusesNewConnectionsAndKeepsOldOnes(t *testing.T) {
	t.Parallel()
	p := NewProxy(t, Start(t).Addr())
	old := connect(t, p.URL())
	ping(t, old)
	p.Refuse(true)
	if conn, err := net.Dial("tcp", p.Addr()); err == nil {
		conn.Close()
		t.Error("a new connection was accepted")
	}
	ping(t, old)
	p.Refuse(false)
	ping(t, connect(t, p.URL()))
}

func TestProxyClosesWhenTheServerDies(t *testing.T) {
	t.Parallel()
	s := Start(t)
	p := NewProxy(t, s.Addr())
	conn := dial(t, p)
	s.Kill()
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("an answer from a dead server")
	}
	proc.Eventually(t, "the proxy has no connection", func() bool { return p.OpenConns() == 0 })
	s.Restart()
	ping(t, connect(t, p.URL()))
}

func TestProxyConnectsSlowlyAndIsFastAfterwards(t *testing.T) {
	t.Parallel()
	p := NewProxy(t, Start(t).Addr())
	old := connect(t, p.URL())
	ping(t, old)
	const delay = 300 * time.Millisecond
	p.SetConnectDelay(delay)
	start := time.Now()
	client := connect(t, p.URL())
	ping(t, client)
	if took := time.Since(start); took < delay {
		t.Errorf("the first answer came after %v, want at least %v", took, delay)
	}
	start = time.Now()
	ping(t, client)
	ping(t, old)
	if took := time.Since(start); took >= delay {
		t.Errorf("connections that are open took %v", took)
	}
}

func TestProxyLosesRepliesOfOneCommand(t *testing.T) {
	t.Parallel()
	s := Start(t)
	p := NewProxy(t, s.Addr())
	victim, other := connect(t, p.URL()), connect(t, p.URL())
	ping(t, victim)
	p.DropRepliesTo("INCR")
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := victim.Incr(ctx, "n").Err(); err == nil {
		t.Error("the reply was not lost")
	}
	proc.Eventually(t, "the server has executed it", func() bool { return s.Do("get", "n") == "1" })
	ping(t, other)
	p.DropRepliesTo("")
	if err := victim.Incr(t.Context(), "n").Err(); err != nil {
		t.Errorf("on a new connection: %v", err)
	}
}

func TestProxySendsNewConnectionsElsewhere(t *testing.T) {
	t.Parallel()
	first, second := Start(t), Start(t)
	p := NewProxy(t, first.Addr())
	old := connect(t, p.URL())
	ping(t, old)
	p.SetTarget(second.Addr())
	for client, server := range map[*redis.Client]*Server{old: first, connect(t, p.URL()): second} {
		if err := client.Set(t.Context(), "from", server.Addr(), 0).Err(); err != nil {
			t.Fatal(err)
		}
		if from := server.Do("get", "from"); from != server.Addr() {
			t.Errorf("the server on %s has what was meant for %v", server.Addr(), from)
		}
	}
}

func TestCommandCounterWithEveryCut(t *testing.T) {
	stream := []byte("*2\r\n$3\r\nGET\r\n$1\r\na\r\n" + "*1\r\n$4\r\nPING\r\n" +
		"*3\r\n$3\r\nset\r\n$4\r\n\r\n*1\r\n$0\r\n\r\n" + "*1\r\n$4\r\nPIN")
	want := []string{"get", "ping", "set"}
	for cut := range stream {
		var c commandCounter
		if got := append(c.feed(stream[:cut]), c.feed(stream[cut:])...); !slices.Equal(got, want) {
			t.Errorf("cut at %d: got %q, want %q", cut, got, want)
		}
	}
	var c commandCounter
	if got := c.feed([]byte("\x16\x03\x01*9\r\n\n\r\n$7\r\n*-1\r\nnonsense\r\n")); len(got) != 0 {
		t.Errorf("no commands: got %q", got)
	}
	long := "*1\r\n$100\r\n" + strings.Repeat("x", 100) + "\r\n"
	if got := c.feed([]byte(long)); !slices.Equal(got, []string{strings.Repeat("x", maxName)}) {
		t.Errorf("a long name: got %q, want its beginning", got)
	}
}

func ping(t *testing.T, client *redis.Client) {
	t.Helper()
	if err := client.Ping(t.Context()).Err(); err != nil {
		t.Fatalf("ping: %v", err)
	}
}

// dial opens a connection through the proxy that has had an answer of the server.
func dial(t *testing.T, p *Proxy) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if _, err := conn.Write([]byte("PING\r\n")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(conn, make([]byte, len("+PONG\r\n"))); err != nil {
		t.Fatalf("ping: %v", err)
	}
	return conn
}
