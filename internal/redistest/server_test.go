package redistest

import (
	"context"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"github.com/caddy-tollgate/ratelimit/internal/proc"
)

func TestServerAnswersAndCounts(t *testing.T) {
	t.Parallel()
	s := Start(t)
	if got := s.Do("set", "b", "x"); got != "OK" {
		t.Errorf("set: got %v, want OK", got)
	}
	s.Do("set", "a", "y", "px", 60_000)
	if got := s.Do("get", "none"); got != nil {
		t.Errorf("get of no key: got %v, want nil", got)
	}
	if got := s.Do("incr", "c"); got != int64(1) {
		t.Errorf("incr: got %v, want 1", got)
	}
	if got := s.Keys(); len(got) != 3 || got[0] != "a" || got[1] != "b" || got[2] != "c" {
		t.Errorf("keys: got %v, want [a b c]", got)
	}
	if got := s.Calls("set"); got != 2 {
		t.Errorf("calls of set: got %d, want 2", got)
	}
	if got := s.Calls("evalsha"); got != 0 {
		t.Errorf("calls of evalsha: got %d, want 0", got)
	}
	if got := s.Info("clients", "connected_clients"); got != "1" {
		t.Errorf("connected clients: got %q, want the one of the assertions", got)
	}
	if got := s.Info("clients", "nonsense"); got != "" {
		t.Errorf("a field that is not there: got %q", got)
	}
	ttls := s.TTLs()
	if ttl := ttls["a"]; ttl <= 0 || ttl > time.Minute {
		t.Errorf("TTL of a: got %v, want at most 1m", ttl)
	}
	if ttl := ttls["b"]; ttl != NoTTL {
		t.Errorf("TTL of b: got %v, want none", ttl)
	}
}

func TestTTLsOfAnEmptyServer(t *testing.T) {
	t.Parallel()
	if got := Start(t).TTLs(); len(got) != 0 {
		t.Errorf("got %v, want none", got)
	}
}

func TestServerRestartsEmptyOnItsPort(t *testing.T) {
	t.Parallel()
	s := Start(t)
	addr := s.Addr()
	s.Do("set", "a", "x")
	s.Kill()
	if conn, err := net.Dial("tcp", addr); err == nil {
		conn.Close()
		t.Error("a killed server accepts connections")
	}
	s.Restart()
	if s.Addr() != addr {
		t.Errorf("address: got %s, want %s", s.Addr(), addr)
	}
	if keys := s.Keys(); len(keys) != 0 {
		t.Errorf("keys after a restart: got %v, want none", keys)
	}
	s.Restart() // one that runs
	s.Do("ping")
}

func TestStoppedServerAcceptsButDoesNotAnswer(t *testing.T) {
	t.Parallel()
	s := Start(t)
	client := connect(t, s.URL())
	s.Stop()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := client.Ping(ctx).Err(); err == nil {
		t.Error("a stopped server answered")
	}
	s.Cont()
	proc.Eventually(t, "the server answers again", func() bool { return client.Ping(t.Context()).Err() == nil })
}

func TestStartWithAPassword(t *testing.T) {
	t.Parallel()
	s := Start(t, "--requirepass", "secret")
	if got := s.Do("ping"); got != "PONG" {
		t.Errorf("ping: got %v", got)
	}
	if err := connect(t, s.URL()).Ping(t.Context()).Err(); err != nil {
		t.Errorf("with the URL of the server: %v", err)
	}
	if err := connect(t, "redis://"+s.Addr()).Ping(t.Context()).Err(); err == nil {
		t.Error("without a password: no error")
	}
}

func TestStartWithAUser(t *testing.T) {
	t.Parallel()
	s := Start(t, "--user", "alice", "on", ">pw", "~tollgate:*", "+@all")
	alice := connect(t, "redis://alice:pw@"+s.Addr())
	if err := alice.Set(t.Context(), "tollgate:x", 1, 0).Err(); err != nil {
		t.Errorf("an allowed key: %v", err)
	}
	if err := alice.Set(t.Context(), "other", 1, 0).Err(); err == nil {
		t.Error("another key: no error")
	}
}

func TestStartASentinel(t *testing.T) {
	t.Parallel()
	master, sentinel := Start(t), Start(t, "--sentinel")
	_, port, err := net.SplitHostPort(master.Addr())
	if err != nil {
		t.Fatal(err)
	}
	sentinel.Do("sentinel", "monitor", "main", "127.0.0.1", port, 1)
	address, _ := sentinel.Do("sentinel", "get-master-addr-by-name", "main").([]any)
	if len(address) != 2 || address[1] != port {
		t.Errorf("master: got %v, want port %s", address, port)
	}
}

func TestStartAClusterNode(t *testing.T) {
	t.Parallel()
	s := Start(t, "--cluster-enabled", "yes", "--cluster-port", strconv.Itoa(Port(t)))
	s.Do("cluster", "addslotsrange", 0, 16383)
	proc.Eventually(t, "the cluster is complete", func() bool {
		info, _ := s.Do("cluster", "info").(string)
		return len(info) > 0 && info[:len("cluster_state:ok")] == "cluster_state:ok"
	})
	s.Do("set", "a", "x")
}

func TestServersAndProxiesLeaveNoGoroutines(t *testing.T) {
	before := goleak.IgnoreCurrent()
	t.Run("inner", func(t *testing.T) {
		s := Start(t)
		p := NewProxy(t, s.Addr())
		p.SetDelay(time.Hour) // nothing waits for what is on its way
		conn, err := net.Dial("tcp", p.Addr())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		if _, err := conn.Write([]byte("PING\r\n")); err != nil {
			t.Fatal(err)
		}
		proc.Eventually(t, "the proxy has it", func() bool { n, _ := p.Bytes(); return n > 0 })
		s.Restart()
	})
	goleak.VerifyNone(t, before)
}

func connect(t *testing.T, url string) *redis.Client {
	t.Helper()
	options := quiet(url)
	options.ContextTimeoutEnabled = true
	options.MaxRetries = -1
	client := redis.NewClient(options)
	t.Cleanup(func() { client.Close() })
	return client
}
