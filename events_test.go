package ratelimit

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/goleak"

	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

func init() { caddy.RegisterModule(new(eventRecorder)) }

// eventRecorder is a handler of events that notes them. What it notes is one list for all of them.
type eventRecorder struct{}

var recorded struct {
	sync.Mutex
	events []caddy.Event
	gate   chan struct{} // if there is one, handlers wait until it is closed
}

func (*eventRecorder) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "events.handlers.recorder", New: func() caddy.Module { return new(eventRecorder) }}
}

func (*eventRecorder) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	return nil
}

func (*eventRecorder) Handle(_ context.Context, e caddy.Event) error {
	recorded.Lock()
	recorded.events = append(recorded.events, e)
	gate := recorded.gate
	recorded.Unlock()
	if gate != nil {
		<-gate
	}
	if e.Data["panic"] == true {
		panic("a test wants it")
	}
	return nil
}

// takeEvents returns what was recorded since it was called last.
func takeEvents() []caddy.Event {
	recorded.Lock()
	defer recorded.Unlock()
	events := recorded.events
	recorded.events = nil
	return events
}

// awaitEvent waits for the next event, which must be of a name, and returns it.
func awaitEvent(t *testing.T, name string) caddy.Event {
	t.Helper()
	var events []caddy.Event
	proc.Eventually(t, name+" is told", func() bool {
		events = append(events, takeEvents()...)
		return len(events) > 0
	})
	if len(events) != 1 || events[0].Name() != name {
		t.Fatalf("got %v, want one event %s", events, name)
	}
	return events[0]
}

const recordsEvents = `events {
	on rate_limit_exceeded recorder
	on rate_limit_blocked recorder
	on rate_limit_unblocked recorder
	on rate_limit_store_down recorder
	on rate_limit_store_up recorder
	on rate_limit_shed recorder
}`

// Every change is told once, by the module that it concerns, with what handlers need.
func TestEvents(t *testing.T) {
	release := make(chan struct{})
	backend := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-release }))
	t.Cleanup(backend.Close)
	redis := redistest.Start(t)
	s := serveWith(t, "INFO", recordsEvents, fmt.Sprintf(`:8080 {
	rate_limit /slow {
		shed 1
	}
	rate_limit / {
		redis %s
		nodes 1
		penalty {
			after 1
		}
		zone api {
			key {header.X-Refuse}
			rate 1/h
			burst 1
		}
	}
	reverse_proxy /slow %s
}`, redis.Addr(), backend.Listener.Addr()))
	takeEvents()

	s.ask("GET", "http://localhost/", "alice")
	s.ask("GET", "http://localhost/", "alice")
	e := awaitEvent(t, "rate_limit_exceeded")
	if wait, ok := e.Data["wait"].(time.Duration); !ok || wait < 59*time.Minute || wait > time.Hour {
		t.Errorf("wait is %v, want an hour", e.Data["wait"])
	}
	wantData(t, e, "http.handlers.rate_limit", map[string]any{"zone": "api", "remote_ip": "127.0.0.1", "client_ip": "127.0.0.1", "reason": "limited"})
	for range 5 {
		s.ask("GET", "http://localhost/", "alice")
	}
	e = awaitEvent(t, "rate_limit_blocked")
	wantData(t, e, "http.handlers.rate_limit", map[string]any{"zone": "api", "remote_ip": "127.0.0.1", "group": "", "strikes": int64(2), "wait": 2 * time.Minute})
	if until, ok := e.Data["until"].(time.Time); !ok || time.Until(until) > 2*time.Minute {
		t.Errorf("until is %v", e.Data["until"])
	}

	var asks sync.WaitGroup
	for range 3 {
		asks.Go(func() { s.ask("GET", "http://localhost/slow", "") })
	}
	e = awaitEvent(t, "rate_limit_shed")
	wantData(t, e, "http.handlers.rate_limit", map[string]any{"pool": "default", "in_flight": int64(1), "max_in_flight": int64(1)})
	close(release)
	asks.Wait()

	redis.Kill()
	clients := 0
	proc.Eventually(t, "Redis counts as down", func() bool {
		clients++
		s.ask("GET", "http://localhost/", fmt.Sprint("client ", clients))
		return isDown(running.Load())
	})
	e = awaitEvent(t, "rate_limit_store_down")
	wantData(t, e, "rate_limit", map[string]any{"redis": redis.Addr() + "/0"})
	if text, ok := e.Data["error"].(string); !ok || text == "" {
		t.Errorf("error is %v", e.Data["error"])
	}
	redis.Restart()
	e = awaitEvent(t, "rate_limit_store_up")
	wantData(t, e, "rate_limit", map[string]any{"redis": redis.Addr() + "/0"})

	emitUnblocked(ID{1}, []string{"strict"}, 1)
	e = awaitEvent(t, "rate_limit_unblocked")
	wantData(t, e, "rate_limit", map[string]any{"id": ID{1}.String(), "by": "admin", "forgotten": 1})
	if groups, ok := e.Data["groups"].([]string); !ok || !slices.Equal(groups, []string{"strict"}) {
		t.Errorf("groups are %v", e.Data["groups"])
	}
}

func isDown(a *App) bool {
	w := a.remotes[0].client.enter()
	defer a.remotes[0].client.leave(1)
	down, _ := w.route("").breaker.state()
	return down
}

func wantData(t *testing.T, e caddy.Event, origin string, want map[string]any) {
	t.Helper()
	if got := string(e.Origin().CaddyModule().ID); got != origin {
		t.Errorf("%s comes from %s, want %s", e.Name(), got, origin)
	}
	for key, value := range want {
		if e.Data[key] != value {
			t.Errorf("%s: %s is %v, want %v (%v)", e.Name(), key, e.Data[key], value, e.Data)
		}
	}
}

// A handler that hangs delays nobody, what waits for it is bounded and the rest counted, and one that panics harms nobody. With the
// last event the goroutine goes.
func TestSlowEventHandlers(t *testing.T) {
	s := serveWith(t, "INFO", recordsEvents, ":8080 {\n rate_limit {\n zone api {\n rate 1/h\n burst 1\n }\n }\n respond ok\n}")
	takeEvents()
	ignore := goleak.IgnoreCurrent()
	gate := make(chan struct{})
	recorded.Lock()
	recorded.gate = gate
	recorded.Unlock()
	lost := processBook.lostEvents.Load()
	const events = 5000
	for i := range events {
		emit(eventExceeded, func() map[string]any { return map[string]any{"i": i, "panic": i == 1} })
	}
	if status := s.ask("GET", "http://localhost/", "").status; status != 200 {
		t.Errorf("status %d while a handler hangs", status)
	}
	recorded.Lock()
	recorded.gate = nil
	recorded.Unlock()
	close(gate)
	proc.Eventually(t, "nothing runs any more", func() bool { return goleak.Find(ignore) == nil })
	told, gone := len(takeEvents()), int(processBook.lostEvents.Load()-lost)
	if told+gone != events || told < maxEvents || told > 2*maxEvents {
		t.Errorf("%d events told, %d lost; want all %d accounted for, and %d to %d told", told, gone, events, maxEvents, 2*maxEvents)
	}
	processBook.write()
	if lines := loggedBy(t, s, "events lost"); len(lines) != 1 || !strings.Contains(lines[0], fmt.Sprintf(`"events":%d`, gone)) {
		t.Errorf("the log says %q", lines)
	}
}

// loggedBy returns the lines of a server's log with a text.
func loggedBy(t *testing.T, s *testServer, text string) (lines []string) {
	t.Helper()
	log, err := os.ReadFile(s.log)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(log)) {
		if strings.Contains(line, text) {
			lines = append(lines, line)
		}
	}
	return lines
}

// While nobody listens, nothing is put together for an event.
func TestEventsNobodyListensTo(t *testing.T) {
	serveWith(t, "INFO", "events {\n on rate_limit_shed recorder\n}", ":8080 {\n rate_limit {\n zone api {\n rate 1/h\n }\n }\n}")
	takeEvents()
	tell := func() map[string]any { return map[string]any{} }
	emit(eventExceeded, tell)
	emit(eventShed, tell)
	awaitEvent(t, "rate_limit_shed")
	app := running.Load()
	proc.Eventually(t, "it is known that nobody listens", func() bool { return app.deaf[eventExceeded].Load() })
	emit(eventExceeded, func() map[string]any { t.Error("asked for what nobody wants to know"); return nil })
	if n := testing.AllocsPerRun(100, func() { emit(eventExceeded, tell) }); n > 0 {
		t.Errorf("%v allocations for an event that nobody listens to", n)
	}
	if app.deaf[eventShed].Load() {
		t.Error("somebody listens to rate_limit_shed")
	}
}
