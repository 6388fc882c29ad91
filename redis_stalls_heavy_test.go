//go:build redis || soak

package ratelimit

import (
	"bufio"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// A Redis that gets slow and then hangs, under a Caddy that has a thousand requests a second. What is printed is for people;
// what is held are bounds that a busy machine keeps, too.

const (
	stallRate, stallBurst = 800, 400 // of the normal route, which is asked more often
	stallNodes            = 2        // one of which runs
)

// stallTimes are how long each state lasts.
type stallTimes struct {
	well, slow, hung time.Duration
}

// TestHeavyStallsUnderLoad is what make test-redis has time for; make soak stops Redis for a minute.
func TestHeavyStallsUnderLoad(t *testing.T) {
	stallsUnderLoad(t, stallTimes{well: 2 * time.Second, slow: 4 * time.Second, hung: 5 * time.Second})
}

// stallSite limits two routes, and a third not at all.
var stallSite = site(fmt.Sprintf("redis {$REDIS}\nkey_secret test\nnodes %d", stallNodes), fmt.Sprintf(`
	zone api {
		match path /api
		rate %d/s
		burst %d
	}
	zone login {
		match path /login
		rate 1000000/s
		sensitive
	}`, stallRate, stallBurst))

func stallsUnderLoad(t *testing.T, times stallTimes) {
	server := redistest.Start(t)
	proxy := redistest.NewProxy(t, server.Addr())
	s := &stalls{t: t, server: server, node: node.Start(t, stallSite, node.Env("REDIS", proxy.Addr())), routes: []*pacedRoute{
		{path: "/api", rate: 1000, clients: 96},
		{path: "/login", rate: 100, clients: 80},
		{path: "/free", rate: 100, clients: 8}, // no zone has it: what the machine itself costs
	}}
	proc.Eventually(t, "Redis counts as up", s.isUp)
	stop := s.load()
	defer stop()
	s.calm = s.phase("Redis is well", times.well)
	delayed := func(d time.Duration) func() { return func() { proxy.SetDelay(d / 2) } } // in each direction
	s.endure("200 ms slow", delayed(200*time.Millisecond), delayed(0), times.slow, times.well)
	s.endure("2 s slow", delayed(2*time.Second), delayed(0), times.slow, times.well)
	s.endure("SIGSTOP", server.Stop, server.Cont, times.hung, times.well)
	stop()
	s.bounded()
	s.oneLineEach()
}

// stalls is a Caddy under load.
type stalls struct {
	t            *testing.T
	server       *redistest.Server
	node         *node.Node
	routes       []*pacedRoute
	begun, ended time.Time
	calm         measured // before the first stall
}

// measured is what was seen in a phase.
type measured struct {
	goroutines int // at most
	resident   int64
}

// load sends requests until stopped.
func (s *stalls) load() (stop func()) {
	s.begun = time.Now()
	var done atomic.Bool
	var wg sync.WaitGroup
	for _, r := range s.routes {
		r.statuses = map[int]int{}
		r.total = map[int]int{}
		for range r.clients {
			conn := s.dial()
			wg.Go(func() {
				defer func() { conn.Close() }()
				if err := r.ask(conn, s.begun, &done); err != nil {
					s.t.Errorf("%s: %v", r.path, err)
				}
			})
		}
	}
	return sync.OnceFunc(func() {
		done.Store(true)
		wg.Wait()
		s.ended = time.Now()
	})
}

func (s *stalls) dial() net.Conn {
	s.t.Helper()
	conn, err := net.Dial("tcp", s.node.Addr())
	if err != nil {
		s.t.Fatal(err)
	}
	return conn
}

// phase watches for so long, and prints what was seen.
func (s *stalls) phase(what string, howLong time.Duration) (m measured) {
	s.t.Helper()
	for _, r := range s.routes {
		r.since()
	}
	lines := s.node.LogLines(`"rate_limit.redis"`)
	for begun := time.Now(); time.Since(begun) < howLong; time.Sleep(250 * time.Millisecond) {
		m.goroutines = max(m.goroutines, s.node.Goroutines())
		resident, err := proc.Resident(s.node.Pids())
		if err != nil {
			s.t.Fatal(err)
		}
		m.resident = max(m.resident, resident)
	}
	s.t.Logf("%s, for %s: goroutines ≤ %d, RSS ≤ %d MB, log lines %d", what, howLong, m.goroutines, m.resident>>20, s.node.LogLines(`"rate_limit.redis"`)-lines)
	free := s.routes[len(s.routes)-1].since()
	for _, r := range s.routes {
		seen := free
		if r.path != "/free" {
			seen = r.since()
		}
		s.t.Logf("    %-6s %s, added p50 %s, p99 %s", r.path, seen, seen.at(50)-free.at(50), seen.at(99)-free.at(99))
		if longest := seen.at(100); r.path != "/free" && longest > 20*defaultSensitiveTimeout {
			s.t.Errorf("%s: an answer on %s took %s", what, r.path, longest)
		}
		for status := range seen.statuses {
			if status >= 500 && r.path == "/api" {
				s.t.Errorf("%s: status %d on a route that is not sensitive", what, status)
			}
		}
	}
	return m
}

// endure measures a stall and what comes after it.
func (s *stalls) endure(what string, begin, end func(), howLong, after time.Duration) {
	s.t.Helper()
	ups := s.node.LogLines("redis is up again")
	begin()
	s.flat(s.phase(what, howLong))
	if s.isUp() {
		s.t.Errorf("%s: Redis counts as up", what)
	}
	end()
	ended := time.Now()
	proc.Eventually(s.t, "Redis counts as up", func() bool { return s.node.LogLines("redis is up again") > ups && s.isUp() })
	s.t.Logf("%s: Redis is up again %s after its end", what, time.Since(ended).Round(time.Millisecond))
	s.flat(s.phase("after it", after))
	calls := s.server.Calls("evalsha")
	proc.Eventually(s.t, "Redis decides", func() bool { return s.server.Calls("evalsha") > calls+50 })
}

// flat holds what a phase cost against what it cost when all was well. Each client has one connection all the time; while it is
// waiting for an answer, Caddy has one goroutine more for it.
func (s *stalls) flat(now measured) {
	s.t.Helper()
	before, clients := s.calm, 0
	for _, r := range s.routes {
		clients += r.clients
	}
	if now.goroutines > before.goroutines+clients+30 {
		s.t.Errorf("%d goroutines, %d before, %d clients", now.goroutines, before.goroutines, clients)
	}
	if now.resident > before.resident+before.resident/2+32<<20 {
		s.t.Errorf("%d MB resident, %d before", now.resident>>20, before.resident>>20)
	}
}

// isUp says whether the last that was logged about Redis is that it is up.
func (s *stalls) isUp() bool {
	up := false
	for _, line := range s.node.Logs() {
		if msg, _ := line["msg"].(string); strings.HasPrefix(msg, "redis is ") {
			up = strings.HasPrefix(msg, "redis is up")
		}
	}
	return up
}

// bounded holds what was admitted on the normal route against what Redis may admit in all that time, and the share.
func (s *stalls) bounded() {
	s.t.Helper()
	seconds := s.ended.Sub(s.begun).Seconds()
	limit := stallBurst + stallRate*seconds
	down := s.down().Seconds()
	share := (stallBurst + stallRate*down) / stallNodes
	r := s.routes[0]
	s.t.Logf("admitted %d of %d in %.1f s, of which Redis was down for %.1f s; at most %.0f by the limit and %.0f by the share", r.total[200], r.total[200]+r.total[429], seconds, down, limit, share)
	if admitted := float64(r.total[200]); admitted > limit+share || admitted == 0 || r.total[429] == 0 {
		s.t.Errorf("%v admitted, at most %.0f", admitted, limit+share)
	}
}

// down returns for how long Redis was down, by the log.
func (s *stalls) down() (sum time.Duration) {
	for _, line := range s.node.Logs() {
		if outage, ok := line["outage"].(float64); ok {
			sum += time.Duration(outage * float64(time.Second))
		}
	}
	return sum
}

// oneLineEach holds that every line about Redis is a change of its state.
func (s *stalls) oneLineEach() {
	s.t.Helper()
	var said []string
	for _, line := range s.node.Logs() {
		if line["logger"] == "rate_limit.redis" {
			msg, _ := line["msg"].(string)
			said = append(said, strings.TrimSuffix(msg, ", deciding without it"))
		}
	}
	s.t.Logf("log: %s", strings.Join(said, "; "))
	want := "redis is up"
	for i, msg := range said {
		if msg != want {
			s.t.Errorf("line %d says %q, not %q", i+1, msg, want)
		}
		want = "redis is down"
		if msg == want {
			want = "redis is up again"
		}
	}
	if len(said) > 1+4*3 { // a busy machine may look like an outage of its own
		s.t.Errorf("%d lines in three outages", len(said))
	}
}

// pacedRoute is a path that is asked so often a second, whatever becomes of the answers.
type pacedRoute struct {
	path          string
	rate, clients int
	next          atomic.Int64

	mu       sync.Mutex
	took     []time.Duration // of the present phase
	statuses map[int]int
	total    map[int]int // of all phases
}

// ask sends requests over a connection, each when it is its turn. How long one takes counts from when it should have been sent.
func (r *pacedRoute) ask(conn net.Conn, begun time.Time, done *atomic.Bool) error {
	request := []byte("GET " + r.path + " HTTP/1.1\r\nHost: test\r\n\r\n")
	answers := bufio.NewReader(conn)
	for {
		due := begun.Add(time.Duration(r.next.Add(1)) * time.Second / time.Duration(r.rate))
		time.Sleep(time.Until(due))
		if done.Load() {
			return nil
		}
		if _, err := conn.Write(request); err != nil {
			return err
		}
		answer, err := http.ReadResponse(answers, nil)
		if err != nil {
			return err
		}
		_, err = io.Copy(io.Discard, answer.Body)
		answer.Body.Close()
		if err != nil {
			return err
		}
		r.note(answer.StatusCode, time.Since(due))
	}
}

func (r *pacedRoute) note(status int, took time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.took = append(r.took, took)
	r.statuses[status]++
	r.total[status]++
}

// since returns what was seen since it was called last.
func (r *pacedRoute) since() pacedAnswers {
	r.mu.Lock()
	seen := pacedAnswers{r.took, r.statuses}
	r.took, r.statuses = nil, map[int]int{}
	r.mu.Unlock()
	slices.Sort(seen.took)
	return seen
}

// pacedAnswers are what a route was answered, the fastest first.
type pacedAnswers struct {
	took     []time.Duration
	statuses map[int]int
}

// at returns how long so many percent of the answers took at most.
func (a pacedAnswers) at(percent int) time.Duration {
	if len(a.took) == 0 {
		return 0
	}
	return a.took[min(len(a.took)*percent/100, len(a.took)-1)].Round(10 * time.Microsecond)
}

func (a pacedAnswers) String() string {
	var counts []string
	for _, status := range slices.Sorted(maps.Keys(a.statuses)) {
		counts = append(counts, fmt.Sprintf("%d × %d", a.statuses[status], status))
	}
	return fmt.Sprintf("%s: p50 %s, p99 %s, max %s", strings.Join(counts, ", "), a.at(50), a.at(99), a.at(100))
}
