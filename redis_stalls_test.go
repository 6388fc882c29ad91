package ratelimit

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// What a slow Redis, or one that is down, must not be charged with, and what it must not be sent.

// A client that disconnects while Redis is about to decide is neither a failure of Redis nor a second debit, and not free either.
func TestClientsLeaveMidDecision(t *testing.T) {
	const burst, alone, together = 1000, 10, 30
	server := redistest.Start(t)
	proxy := redistest.NewProxy(t, server.Addr())
	zone := func(name, more string) string {
		return fmt.Sprintf("zone %s {\n match path /%s\n rate 1/h\n burst %d\n%s\n}\n", name, name, burst, more)
	}
	n := node.Start(t, site(patientRedis+"nodes 1", zone(normalZone, "")+zone(sensitiveZone, "sensitive")), node.Env("REDIS", proxy.Addr()))
	left := func(zone string) string { return n.Get("/" + zone).Header.Get("X-RateLimit-Remaining") }
	for _, zone := range []string{normalZone, sensitiveZone} {
		proc.Eventually(t, "Redis is up", func() bool { return n.LogLines("redis is up") == 1 })
		if got := left(zone); got != strconv.Itoa(burst-1) {
			t.Fatalf("%s: %s left after one request", zone, got)
		}
		proxy.SetDelay(50 * time.Millisecond)
		for range alone {
			sent := proxy.Requests()
			conn := sendOnly(t, n, zone)
			proc.Eventually(t, "the decision is on its way", func() bool { return proxy.Requests() > sent })
			_ = conn.(*net.TCPConn).SetLinger(0) // a reset; what is not read yet is lost
			conn.Close()
		}
		for range together {
			sendOnly(t, n, zone).Close()
		}
		key := theIdentity(t, server)
		proc.Eventually(t, "all are charged", func() bool { return missingTokens(server, key, zone, burst) >= 1+alone+together })
		proxy.SetDelay(0)
		if got, want := left(zone), strconv.Itoa(burst-1-alone-together-1); got != want {
			t.Errorf("%s: %s left, want %s", zone, got, want)
		}
	}
	n.Stop() // waits for whoever is not answered yet
	for _, zone := range []string{normalZone, sensitiveZone} {
		if got := missingTokens(server, theIdentity(t, server), zone, burst); got != 1+alone+together+1 {
			t.Errorf("%s: %d debits for %d requests", zone, got, 1+alone+together+1)
		}
	}
	if lines := n.LogLines(`"rate_limit.redis"`); lines != 1 {
		t.Errorf("%d log lines about Redis, want the one of the start", lines)
	}
}

// sendOnly sends a request and does not wait for the answer.
func sendOnly(t *testing.T, n *node.Node, zone string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", n.Addr())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Fprintf(conn, "GET /%s HTTP/1.1\r\nHost: test\r\n\r\n", zone); err != nil {
		t.Fatal(err)
	}
	return conn
}

// theIdentity returns the key of the only identity that a server knows.
func theIdentity(t *testing.T, server *redistest.Server) (found string) {
	t.Helper()
	for _, key := range server.Keys() {
		if strings.HasSuffix(key, "}") { // others are of probes, and the list of nodes
			if found != "" {
				t.Errorf("two identities: %s and %s", found, key)
			}
			found = key
		}
	}
	return found
}

// executed is a call of the script that a server has executed.
type executed struct {
	at     time.Duration // since the epoch, by its clock
	client string        // its address
	probe  bool
}

func (e executed) isProbe() bool { return e.probe }

// watchScripts returns a function that tells which calls of the script a server has executed since now.
func watchScripts(t *testing.T, server *redistest.Server) func() []executed {
	t.Helper()
	conn, err := net.Dial("tcp", server.Addr())
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(conn)
	if _, err := conn.Write([]byte("MONITOR\r\n")); err != nil {
		t.Fatal(err)
	}
	if line, err := lines.ReadString('\n'); err != nil || line != "+OK\r\n" {
		t.Fatalf("got %q, %v", line, err)
	}
	var mu sync.Mutex
	var seen []executed
	var reading sync.WaitGroup
	reading.Go(func() {
		for {
			line, err := lines.ReadString('\n')
			if err != nil {
				return // closed
			}
			if !strings.Contains(line, `] "evalsha" "`) {
				continue
			}
			e := executed{probe: strings.Contains(line, `:{probe0}:`)}
			var at float64
			if _, err := fmt.Sscanf(line, "+%f [0 %s", &at, &e.client); err != nil {
				t.Errorf("reading %q: %v", line, err)
			}
			e.at, e.client = time.Duration(at*float64(time.Second)), strings.TrimSuffix(e.client, "]")
			mu.Lock()
			seen = append(seen, e)
			mu.Unlock()
		}
	})
	t.Cleanup(func() { conn.Close(); reading.Wait() })
	return func() []executed {
		mu.Lock()
		defer mu.Unlock()
		return seen[:len(seen):len(seen)]
	}
}

// While a Redis is down, only probes reach it, one at a time and not in step. When it could answer again, no request is sent
// before a probe was answered.
func TestOnlyProbesReachWhatIsDown(t *testing.T) {
	const probes, way = 11, 25 * time.Millisecond
	s := proxied(t, redisSettings{timeout: 60 * time.Millisecond, patience: 120 * time.Millisecond})
	s.awaitRedis()
	seen := watchScripts(t, s.server)
	stop := s.askOn()
	defer stop()
	s.proxy.DropRepliesTo("evalsha") // what opens a connection is answered
	proc.Eventually(t, "Redis is down", s.store.down)
	begin, sent := len(seen()), s.proxy.Requests()
	// What was on its way when it went down can come beside the first probe.
	second := func() (i int) {
		all := seen()[begin:]
		first := slices.IndexFunc(all, executed.isProbe)
		if first < 0 || first+1 >= len(all) {
			return -1
		}
		return begin + first + 1 + max(0, slices.IndexFunc(all[first+1:], executed.isProbe))
	}
	proc.Eventually(t, "there are some probes", func() bool { return len(seen()) >= begin+probes+2 })
	// Each probe uses up a connection; to open another takes a command.
	if n, came := s.proxy.Requests()-sent, len(seen())-begin; n > 2*came+warmConns {
		t.Errorf("%d commands for %d probes", n, came)
	}
	s.proxy.SetDelay(way)
	s.proxy.DropRepliesTo("")
	proc.Eventually(t, "Redis decides", func() bool { all := seen(); return !all[len(all)-1].probe })
	stop()
	alone := seen()[second():]
	first := slices.IndexFunc(alone, func(e executed) bool { return !e.probe })
	if first < probes-1 {
		t.Fatalf("command %d while Redis was down was no probe", first)
	}
	if after := alone[first].at - alone[first-1].at; after < 2*way-5*time.Millisecond {
		t.Errorf("a request came %s after the last probe, whose answer took %s, and the request as long", after, way)
	}
	jittered(t, alone[:probes-1], s.settings.patience)
}

// askOn asks for both zones until stopped.
func (s *stand) askOn() (stop func()) {
	var done atomic.Bool
	var clients sync.WaitGroup
	for _, zone := range []string{normalZone, normalZone, sensitiveZone, sensitiveZone} {
		clients.Go(func() {
			for ; !done.Load(); time.Sleep(time.Millisecond) {
				s.decide(context.Background(), zone)
			}
		})
	}
	return func() { done.Store(true); clients.Wait() }
}

// jittered holds that probes come one after the other, each of which has so much time, and not in step.
func jittered(t *testing.T, probes []executed, patience time.Duration) {
	t.Helper()
	shortest, longest := time.Hour, time.Duration(0)
	for i := 1; i < len(probes); i++ {
		gap := probes[i].at - probes[i-1].at
		if gap < patience/2 {
			t.Errorf("a probe came %s after another, which had %s", gap, patience)
		}
		if i > 4 { // from then on the pause is as long as it gets
			shortest, longest = min(shortest, gap), max(longest, gap)
		}
	}
	t.Logf("from %s to %s between two probes", shortest, longest)
	if longest-shortest < 10*time.Millisecond || longest > 30*probeMax {
		t.Errorf("from %s to %s between two probes", shortest, longest)
	}
}

// Where opening a connection takes long, one that breaks while all is well costs nobody anything: others are warm.
func TestSlowConnectsAndABrokenConnection(t *testing.T) {
	s := encrypted(t, shortBudgets, trusted)
	s.awaitRedis()
	// Assertions do not use TLS, so they come to another port.
	ids := func() []string {
		return clientIDs(s.server, func(client string) bool { return !strings.Contains(client, " laddr="+s.server.Addr()+" ") })
	}
	proc.Eventually(t, "all connections are warm", func() bool { return len(ids()) >= warmConns })
	s.proxy.SetConnectDelay(300 * time.Millisecond)
	s.forget()
	seen := watchScripts(t, s.server)
	for range 6 {
		calls := len(seen())
		s.ask(1)
		proc.Eventually(t, "the server has executed both", func() bool { return len(seen()) >= calls+2 })
		open, used := s.proxy.OpenConns(), seen()[calls+1].client // the one that is taken next, too
		s.server.Do("client", "kill", "addr", used)
		proc.Eventually(t, "the connection is closed on this side, too", func() bool { return s.proxy.OpenConns() < open })
		s.decide(context.Background(), sensitiveZone)
		var clients sync.WaitGroup
		for range 4 {
			clients.Go(func() { s.ask(5) })
		}
		clients.Wait()
		proc.Eventually(t, "all connections are warm again", func() bool { return len(ids()) >= warmConns })
	}
	answers := s.noted()
	t.Logf("%s: %s; %s: %s", normalZone, counted(answers[normalZone]), sensitiveZone, counted(answers[sensitiveZone]))
	if sensitive := answers[sensitiveZone]; len(sensitive) != 1 || sensitive[byRedis] != 6*(4*5+2) {
		t.Errorf("a sensitive route answered %v", sensitive)
	}
	if answers[normalZone][strconv.Itoa(http.StatusTooManyRequests)] > 0 {
		t.Errorf("got %v", answers)
	}
}

// A Redis, or what stands before it, closes connections that were idle for long. Nobody sends a request on one of them.
func TestIdleConnectionsAreClosedByRedis(t *testing.T) {
	for name, start := range map[string]func(t *testing.T) *stand{
		"plain": func(t *testing.T) *stand { t.Helper(); return proxied(t, longBudgets) },
		"TLS":   func(t *testing.T) *stand { t.Helper(); return encrypted(t, longBudgets, trusted) },
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t)
			s.awaitRedis()
			s.forget()
			proc.Eventually(t, "it is said that Redis is up", func() bool { return len(s.log()) > 0 })
			for i, zone := range []string{sensitiveZone, normalZone, sensitiveZone} {
				proc.Eventually(t, "all connections are warm", func() bool { return s.proxy.OpenConns() >= warmConns })
				opened := s.proxy.Conns()
				s.killClients()
				proc.Eventually(t, "they are closed on this side, too", func() bool { return s.proxy.OpenConns() == 0 })
				if d := s.decide(context.Background(), zone); d.Source != SourceRedis || !d.Allowed {
					t.Errorf("request %d: got %+v", i, d)
				}
				if s.proxy.Conns() == opened {
					t.Errorf("request %d: none was opened", i)
				}
			}
			if lines := s.log(); len(lines) > 0 {
				t.Errorf("logged %q", lines)
			}
		})
	}
}

// clientIDs returns the numbers of those clients of a server whose line in CLIENT LIST is wanted, in the order they came.
func clientIDs(server *redistest.Server, wanted func(client string) bool) (ids []string) {
	list, _ := server.Do("client", "list").(string)
	for client := range strings.Lines(list) {
		if id, _, _ := strings.Cut(strings.TrimPrefix(client, "id="), " "); wanted(client) {
			ids = append(ids, id)
		}
	}
	return ids
}
