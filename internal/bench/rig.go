package bench

import (
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// rig is what stands around the servers of a scenario: a Redis, the way to it, and what a reverse proxy leads to.
type rig struct {
	t     testing.TB
	redis *redistest.Server
	env   map[string]string
	// silence is a server that accepts connections and never answers.
	silence *net.TCPListener
	// roundTrip is what a command to Redis takes on an idle machine, measured.
	roundTrip time.Duration
}

// server is one that is measured.
type server struct {
	subject
	site site
	pids func() []int
	node *node.Node // nil if it is none of this module
}

func newRig(t testing.TB, sc *scenario) *rig {
	t.Helper()
	script, err := filepath.Abs(filepath.Join("..", "..", "bucket.lua"))
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, redis: redistest.Start(t), silence: silence(t)}
	address := r.redis.Addr()
	if sc.distance > 0 || sc.down {
		proxy := redistest.NewProxy(t, address)
		proxy.SetDelay(sc.distance / 2)
		proxy.Refuse(sc.down)
		address = proxy.Addr()
	}
	if !sc.down {
		r.roundTrip = roundTrip(t, address)
	}
	backend := node.Start(t, caddyfile(hello))
	r.env = map[string]string{"REDIS": address, "SCRIPT": script, "BACKEND": backend.Addr(), "HOLD": r.silence.Addr().String()}
	return r
}

// caddyfile returns a whole one. The port is a node's.
func caddyfile(site string) string {
	return "{\nlog {\nlevel WARN\n}\n}\nhttp://127.0.0.1:{$PORT} {\n" + site + "}\n"
}

func silence(t testing.TB) *net.TCPListener {
	t.Helper()
	listener, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	return listener
}

// roundTrip returns the median time that PING takes.
func roundTrip(t testing.TB, address string) time.Duration {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	var h histogram
	buf := make([]byte, 64)
	for range 100 {
		begin := time.Now()
		if _, err := conn.Write([]byte("PING\r\n")); err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Read(buf); err != nil {
			t.Fatal(err)
		}
		h.record(time.Since(begin))
	}
	return h.quantile(0.5)
}

// start starts a server of the scenario.
func (r *rig) start(s subject) *server {
	r.t.Helper()
	options := make([]node.Option, 0, len(r.env)+1)
	for name, value := range r.env {
		options = append(options, node.Env(name, value))
	}
	if s.program != "" {
		options = append(options, node.Program(s.program))
	}
	n := node.Start(r.t, caddyfile(s.site), options...)
	started := &server{subject: s, pids: n.Pids, node: n}
	started.site = site{addr: n.Addr(), path: "/", status: max(s.status, 200)}
	if s.status == 503 {
		r.hold(n)
	}
	return started
}

// hold takes the only slot of a server that sheds, by a request that its backend never answers. Once the backend has the connection,
// the slot is taken.
func (r *rig) hold(n *node.Node) {
	r.t.Helper()
	conn, err := net.Dial("tcp", n.Addr())
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { conn.Close() })
	if _, err := conn.Write([]byte("GET /hold HTTP/1.1\r\nHost: " + n.Addr() + "\r\n\r\n")); err != nil {
		r.t.Fatal(err)
	}
	if err := r.silence.SetDeadline(time.Now().Add(patience)); err != nil {
		r.t.Fatal(err)
	}
	held, err := r.silence.Accept()
	if err != nil {
		r.t.Fatalf("waiting for the request that takes the slot: %v", err)
	}
	r.t.Cleanup(func() { held.Close() })
}

// redisVersion returns the version of redis-server.
func redisVersion(t testing.TB) string {
	t.Helper()
	return redistest.Start(t).Info("server", "redis_version")
}
