// Package redistest starts real Redis servers for tests, each on a port and in a folder of its own, alone, under
// Sentinels or as a cluster, and a proxy that makes the way to them slow or lossy. What Redis decides is never mocked.
package redistest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/caddy-tollgate/ratelimit/internal/proc"
)

// Server is a redis-server without persistence: it starts empty every time.
type Server struct {
	t        testing.TB
	proc     *proc.Process
	dir      string
	port     int
	args     []string
	password string
	proxy    *Proxy        // that is announced in place of the server, nil if none
	client   *redis.Client // of the running server, for assertions
	stopped  bool
}

// Start starts a redis-server on 127.0.0.1 and waits until it answers. The server is killed when the test ends; its log
// is shown if the test failed.
//
// The arguments are added to its command line, and may be whatever it takes: "--maxmemory", "10mb" or "--user",
// "alice", "on", ">pw", "~*", "+@all" or "--cluster-enabled", "yes", "--cluster-port", strconv.Itoa(Port(t)). A server
// with "--requirepass" is asked with that password, and URL holds it; assertions are made by the default user, so leave
// that one its rights. "--sentinel" starts a Sentinel; what it watches is then said by Do("sentinel", "monitor", …).
//
// StartTLS, StartSentinels and StartCluster start what takes more than arguments.
func Start(t testing.TB, args ...string) *Server {
	t.Helper()
	s := newServer(t, args...)
	s.run()
	return s
}

// newServer returns a server that does not run yet. Its address is final, so that others can be told of it before.
func newServer(t testing.TB, args ...string) *Server {
	t.Helper()
	if _, err := exec.LookPath("redis-server"); err != nil {
		t.Fatal("redis-server is not installed; `make tools` installs it")
	}
	s := &Server{t: t, proc: proc.New(t, "redis-server"), dir: t.TempDir(), port: proc.Port(t), args: args}
	s.password = argument(args, "--requirepass")
	t.Cleanup(s.disconnect)
	return s
}

// argument returns the value of a command line's option, empty if it has none.
func argument(args []string, option string) string {
	if i := slices.Index(args, option); i >= 0 && i+1 < len(args) {
		return args[i+1]
	}
	return ""
}

// Port returns a port on 127.0.0.1 that nobody else gets until the test ends.
func Port(t testing.TB) int {
	t.Helper()
	return proc.Port(t)
}

func (s *Server) run() {
	s.t.Helper()
	s.proc.Start(exec.Command("redis-server", s.arguments()...))
	s.proc.Ready(s.answers)
	options := quiet(s.URL())
	options.PoolSize = 1
	s.client = redis.NewClient(options)
}

// quiet returns options for a client that does nothing by itself, so that counters stay readable.
func quiet(url string) *redis.Options {
	options, err := redis.ParseURL(url)
	if err != nil {
		panic(err)
	}
	options.Protocol = 2
	options.DisableIdentity = true
	options.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	return options
}

func (s *Server) arguments() []string {
	if !slices.Contains(s.args, "--sentinel") {
		return append(s.ownArguments(), s.args...)
	}
	path := filepath.Join(s.dir, "sentinel.conf")
	if _, err := os.Stat(path); err == nil {
		return []string{path, "--sentinel"} // the arguments are in it too, and some must not come twice
	}
	// It does not start without a file to keep what it knows in.
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		s.t.Fatal(err)
	}
	return slices.Concat([]string{path}, s.ownArguments(), s.args)
}

func (s *Server) ownArguments() []string {
	return []string{"--bind", "127.0.0.1", "--port", strconv.Itoa(s.port), "--dir", s.dir, "--save", "", "--appendonly", "no"}
}

// answers says whether the server answers at all; that it wants a password is an answer. QUIT is there so that the
// server has forgotten the connection when this returns.
func (s *Server) answers() bool {
	conn, err := net.DialTimeout("tcp", s.Addr(), time.Second)
	if err != nil {
		return false
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(time.Second)); err != nil {
		return false
	}
	if _, err := conn.Write([]byte("PING\r\nQUIT\r\n")); err != nil {
		return false
	}
	replies := bufio.NewReader(conn)
	pong, err := replies.ReadString('\n')
	if err != nil {
		return false
	}
	_, err = replies.ReadString('\n')
	return err == nil && (strings.HasPrefix(pong, "+PONG") || strings.HasPrefix(pong, "-NOAUTH"))
}

func (s *Server) disconnect() {
	if s.client != nil {
		_ = s.client.Close() // the connection may be dead already
		s.client = nil
	}
}

// Addr returns host and port of the server. It stays the same over restarts.
func (s *Server) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port)) }

// Pids returns the server's process, and one that saves for it if there is one now.
func (s *Server) Pids() []int { return s.proc.Pids() }

// URL returns the address of the server as a redis:// URL.
func (s *Server) URL() string { return redisURL("redis", s.password, s.Addr()) }

func redisURL(scheme, password, addr string) string {
	if password != "" {
		password = ":" + password + "@"
	}
	return scheme + "://" + password + addr
}

// Proxy returns the proxy that clients are sent to in place of the server: by Sentinels or by a cluster that was started
// with Proxies. It is nil for others.
func (s *Server) Proxy() *Proxy { return s.proxy }

// announced returns the address that Sentinels or a cluster tell clients.
func (s *Server) announced() string {
	if s.proxy != nil {
		return s.proxy.Addr()
	}
	return s.Addr()
}

// Kill ends the server as a crash would. Connections to it are refused from then on.
func (s *Server) Kill() {
	s.t.Helper()
	s.proc.Kill()
	s.disconnect()
	s.stopped = false
}

// Restart starts the server again, empty, on the same port, and waits until it answers. One that still runs is killed.
// What a Sentinel or a node of a cluster knows about the others is kept.
func (s *Server) Restart() {
	s.t.Helper()
	s.Kill()
	s.run()
}

// Stop makes the server hang: the kernel still accepts connections and bytes for it, but nothing is answered until Cont.
func (s *Server) Stop() {
	s.t.Helper()
	s.proc.Signal(syscall.SIGSTOP)
	s.stopped = true
}

// Cont ends what Stop began.
func (s *Server) Cont() {
	s.t.Helper()
	s.proc.Signal(syscall.SIGCONT)
	s.stopped = false
}

// answering says whether the server was neither killed nor stopped, so that it can be asked.
func (s *Server) answering() bool { return s.client != nil && !s.stopped }

// Do sends one command and returns the reply: int64, string, []any, or nil. An error fails the test.
//
// All assertions of a Server share one connection, TTLs has another; the server's counters include them.
func (s *Server) Do(args ...any) any {
	s.t.Helper()
	reply, err := s.try(args...)
	if err != nil {
		s.t.Fatalf("redis %v: %v", args, err)
	}
	return reply
}

// try does what Do does, for commands that the server may refuse for now.
func (s *Server) try(args ...any) (any, error) {
	if s.client == nil {
		return nil, errors.New("the server was killed")
	}
	reply, err := s.client.Do(context.Background(), args...).Result()
	if errors.Is(err, redis.Nil) {
		return nil, nil
	}
	return reply, err
}

// Info returns a field of a section of INFO as text, empty if there is none: Info("clients", "connected_clients"),
// Info("stats", "total_commands_processed").
func (s *Server) Info(section, field string) string {
	s.t.Helper()
	info, _ := s.Do("info", section).(string)
	for line := range strings.Lines(info) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok && name == field {
			return value
		}
	}
	return ""
}

// Calls returns how often a command was executed since the server started: Calls("evalsha").
func (s *Server) Calls(command string) int {
	s.t.Helper()
	stat := s.Info("commandstats", "cmdstat_"+command)
	if stat == "" {
		return 0
	}
	var calls int
	if _, err := fmt.Sscanf(stat, "calls=%d,", &calls); err != nil {
		s.t.Fatalf("redis: reading the statistics of %s, got %q: %v", command, stat, err)
	}
	return calls
}

// Keys returns all keys of database 0, sorted.
func (s *Server) Keys() []string {
	s.t.Helper()
	found, _ := s.Do("keys", "*").([]any)
	keys := make([]string, len(found))
	for i, key := range found {
		keys[i], _ = key.(string)
	}
	slices.Sort(keys)
	return keys
}

// NoTTL is what TTLs tells about a key that never expires.
const NoTTL = time.Duration(-1)

// TTLs returns how long each key of database 0 will still be there, or NoTTL.
func (s *Server) TTLs() map[string]time.Duration {
	s.t.Helper()
	keys := s.Keys()
	pipe := s.client.Pipeline()
	replies := make(map[string]*redis.DurationCmd, len(keys))
	for _, key := range keys {
		replies[key] = pipe.PTTL(context.Background(), key)
	}
	if _, err := pipe.Exec(context.Background()); err != nil {
		s.t.Fatalf("redis pttl: %v", err)
	}
	ttls := make(map[string]time.Duration, len(replies))
	for key, reply := range replies {
		if ttl := reply.Val(); ttl != -2 { // -2: gone since
			ttls[key] = ttl
		}
	}
	return ttls
}

// Log returns what the server has written so far, over all its starts.
func (s *Server) Log() string {
	s.t.Helper()
	return s.proc.Output()
}
