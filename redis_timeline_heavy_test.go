//go:build redis

package ratelimit

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/proc"
)

// The routes that clients ask for. On a Cluster, the master that fails keeps what api and login count by, and other is counted
// elsewhere.
const (
	routeAPI   = "api"
	routeLogin = "login" // sensitive, and never refused by its limit
	routeOther = "other"
)

// The limits of the routes; that of other does not refill, so that what was admitted can be counted exactly.
const (
	apiRate, apiBurst = 20, 60
	otherBurst        = 2500
)

// timeline is what clients saw while something happened to Redis.
type timeline struct {
	begun time.Time

	mu      sync.Mutex
	answers []sighting
	events  []sighting // of route the text
}

// sighting is what one request got, and when.
type sighting struct {
	at, took time.Duration
	route    string
	status   int
}

func newTimeline() *timeline { return &timeline{begun: time.Now()} }

// note keeps an answer to a request that was sent at a time.
func (l *timeline) note(sent time.Time, route string, status int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.answers = append(l.answers, sighting{time.Since(l.begun), time.Since(sent), route, status})
}

// mark keeps that something happened, and returns when.
func (l *timeline) mark(what string) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	at := time.Since(l.begun)
	l.events = append(l.events, sighting{at: at, route: what})
	return at
}

// hammer has two clients of each route and node ask some hundred times a second until they are stopped.
func (l *timeline) hammer(nodes int, routes []string, ask func(node int, route string) int) (stop func()) {
	done := make(chan struct{})
	var wg sync.WaitGroup
	for c := range 2 * nodes * len(routes) {
		node, route := c%nodes, routes[c/nodes%len(routes)]
		wg.Go(func() {
			pace := time.NewTicker(16 * time.Millisecond)
			defer pace.Stop()
			for {
				select {
				case <-done:
					return
				case <-pace.C:
				}
				sent := time.Now()
				l.note(sent, route, ask(node, route))
			}
		})
	}
	return sync.OnceFunc(func() { close(done); wg.Wait() })
}

// from returns the answers of a route with a status from a time on.
func (l *timeline) from(at time.Duration, route string, status int) []sighting {
	l.mu.Lock()
	defer l.mu.Unlock()
	var found []sighting
	for _, a := range l.answers {
		if a.at >= at && a.route == route && (status == 0 || a.status == status) {
			found = append(found, a)
		}
	}
	return found
}

// await waits until a route has got so many answers with a status from a time on.
func (l *timeline) await(t *testing.T, at time.Duration, route string, status, times int) {
	t.Helper()
	proc.Eventually(t, fmt.Sprintf("%s got %d more answers with status %d", route, times, status), func() bool {
		return len(l.from(at, route, status)) >= times
	})
}

// awaitCalm waits until nothing but Redis has decided for a while.
func (l *timeline) awaitCalm(t *testing.T) {
	t.Helper()
	proc.Eventually(t, "only Redis decides", func() bool {
		logins := l.from(0, routeLogin, 0)
		last := slices.IndexFunc(reversed(logins), func(a sighting) bool { return a.status != 200 })
		return len(logins) > 0 && (last < 0 || last >= 300)
	})
}

func reversed(answers []sighting) []sighting {
	slices.Reverse(answers)
	return answers
}

// String returns the numbers of each status by route in each quarter of a second, and what happened in between.
func (l *timeline) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	const step = 250 * time.Millisecond
	var out strings.Builder
	i, events := 0, l.events
	for at := step; i < len(l.answers); at += step {
		for ; len(events) > 0 && events[0].at < at; events = events[1:] {
			fmt.Fprintf(&out, "\n  %5.2fs -- %s", events[0].at.Seconds(), events[0].route)
		}
		from := i
		for i < len(l.answers) && l.answers[i].at < at {
			i++
		}
		fmt.Fprintf(&out, "\n  %5.2fs %s", at.Seconds(), tallied(l.answers[from:i]))
	}
	return out.String()
}

// tallied returns how many answers of each route had which status.
func tallied(answers []sighting) string {
	counts := map[string]int{}
	for _, a := range answers {
		counts[fmt.Sprintf("%s %d", a.route, a.status)]++
	}
	var parts []string
	for what, n := range counts {
		parts = append(parts, fmt.Sprintf("%s: %d", what, n))
	}
	slices.Sort(parts)
	return strings.Join(parts, ", ")
}

// failover is what happens to a master under load.
type failover struct {
	nodes  int
	routes []string
	ask    func(node int, route string) int
	// fail takes the master away, replaced waits until there is another one that is known, settled until the old one serves nobody
	// any more.
	fail, replaced, settled func()
}

// watch runs a failover under load. It returns when the master failed and when the new one was known.
func (l *timeline) watch(t *testing.T, f *failover) (failed, known time.Duration) {
	t.Helper()
	stop := l.hammer(f.nodes, f.routes, f.ask)
	defer stop()
	l.await(t, 0, routeAPI, 429, 100)
	l.awaitCalm(t)
	failed = l.mark("the master is taken away")
	f.fail()
	f.replaced()
	known = l.mark("the new master is known")
	f.settled()
	l.await(t, l.mark("the old master serves nobody"), routeLogin, 200, 100)
	l.awaitCalm(t)
	return failed, known
}

// check holds what clients saw in a failover against what they may see.
func (l *timeline) check(t *testing.T, failed, known time.Duration) {
	t.Helper()
	t.Log(l.String())
	l.checkStatuses(t)
	recovered := failed
	for _, a := range l.from(0, routeLogin, 503) {
		if a.at < failed {
			t.Errorf("a sensitive route answered 503 at %s, before anything happened", a.at)
		}
		recovered = max(recovered, a.at)
	}
	if recovered-known >= 5*time.Second {
		t.Errorf("Redis decided again %s after the new master was known", recovered-known)
	}
	end := l.mark("the end")
	admitted := len(l.from(0, routeAPI, 200))
	shares := apiBurst + apiRate*(recovered-failed).Seconds()
	bound := apiBurst + apiRate*end.Seconds()
	t.Logf("new master known after %.2f s; last answer without Redis %.2f s after that; %d sensitive requests refused", (known - failed).Seconds(), (recovered - known).Seconds(), len(l.from(0, routeLogin, 503)))
	t.Logf("slowest answer by route: %v", l.slowest())
	t.Logf("%d admitted in %.1f s; one Redis that loses nothing: %.0f, a bucket more that was not replicated: %.0f, with the shares: %.0f",
		admitted, end.Seconds(), bound, bound+apiBurst, bound+apiBurst+shares)
	if float64(admitted) > bound+apiBurst+shares {
		t.Errorf("%d admitted, want at most %.0f", admitted, bound+apiBurst+shares)
	}
}

// slowest returns the longest time that an answer took, by route.
func (l *timeline) slowest() map[string]time.Duration {
	slowest := map[string]time.Duration{}
	for _, a := range l.answers {
		slowest[a.route] = max(slowest[a.route], a.took.Round(time.Millisecond))
	}
	return slowest
}

// checkStatuses holds that only a sensitive route has been refused for want of Redis.
func (l *timeline) checkStatuses(t *testing.T) {
	t.Helper()
	allowed := map[string][]int{routeAPI: {200, 429}, routeLogin: {200, 503}, routeOther: {200, 429}}
	wrong := map[string]int{}
	for _, a := range l.answers {
		if !slices.Contains(allowed[a.route], a.status) {
			wrong[fmt.Sprint(a.route, " ", a.status)]++
		}
	}
	if len(wrong) > 0 {
		t.Errorf("answers by status: %v", wrong)
	}
}
