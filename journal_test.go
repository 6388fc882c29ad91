package ratelimit

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
)

// newsroom is a journal with a clock, and what it has written.
type newsroom struct {
	*journal
	t       *testing.T
	micros  int64
	timer   func()
	due     int64 // when the timer ends, 0 if it is not set
	written *observer.ObservedLogs
}

// newNewsroom returns the journal of a handler with zones and a pool.
func newNewsroom(t *testing.T, level string, zones ...string) *newsroom {
	t.Helper()
	n := &newsroom{t: t, micros: 1_800_000_003_000_000}
	core, written := observer.New(zapcore.InfoLevel)
	n.written = written
	h := &Handler{app: new(App), logger: zap.New(core), LogRefusals: level, Shed: &Shed{Pool: "uploads", MaxInFlight: 7}, pool: new(slotPool)}
	for _, name := range zones {
		h.zones = append(h.zones, &Zone{charge: Charge{Zone: name}})
	}
	n.journal = n.of(h)
	return n
}

// of returns the journal of another handler in the same book.
func (n *newsroom) of(h *Handler) *journal {
	n.t.Helper()
	book := newLogbook(func() int64 { return n.micros }, func(d time.Duration, turn func()) {
		if n.due != 0 {
			n.t.Error("two timers at a time")
		}
		n.due, n.timer = n.micros+d.Microseconds(), turn
	})
	if n.journal != nil {
		book = n.book
	}
	j, err := newJournal(h, book)
	if err != nil {
		n.t.Fatal(err)
	}
	return j
}

// wait lets time pass, with all timers that end in it.
func (n *newsroom) wait(d time.Duration) {
	end := n.micros + d.Microseconds()
	for n.due != 0 && n.due <= end {
		n.micros, n.due = n.due, 0
		n.timer()
	}
	n.micros = end
}

// client returns a charge of one of many clients.
func client(zone string, number int) Charge {
	c := testCharge(zone, 10)
	copy(c.ID[:], fmt.Sprintf("client %d", number))
	return c
}

// refuse refuses a request of a client for a reason.
func (n *newsroom) refuse(zone string, number int, reason Reason) {
	c := client(zone, number)
	d := Decision{Reason: reason, Zone: zone, Now: n.micros, RetryAfter: 1500 * time.Millisecond}
	n.decided(requestFrom("203.0.113.9"), []Charge{c}, &d)
}

// lines returns what was written since, a line each: the message, and its fields but those that say who it was.
func (n *newsroom) lines() string {
	var lines []string
	for _, entry := range n.written.TakeAll() {
		line := entry.Message
		for _, field := range entry.Context {
			switch field.Key {
			case "client_ip", "id", "method", "host", "path", "until":
				continue
			}
			encoder := zapcore.NewMapObjectEncoder()
			field.AddTo(encoder)
			line += fmt.Sprintf(" %s=%v", field.Key, encoder.Fields[field.Key])
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "\n")
}

func (n *newsroom) wrote(what, want string) {
	n.t.Helper()
	if got := n.lines(); got != strings.TrimSpace(want) {
		n.t.Errorf("%s: wrote\n%s\nwant\n%s", what, got, want)
	}
}

func requestFrom(address string) *http.Request {
	r := caddyhttp.PrepareRequest(httptest.NewRequest("GET", "/search?q=secret", nil), caddy.NewReplacer(), httptest.NewRecorder(), nil)
	caddyhttp.SetVar(r.Context(), caddyhttp.ClientIPVarKey, address)
	return r
}

// A client has a line when it is refused first; the rest is summed up once a period, also if nobody comes any more, and then
// nothing is left to do.
func TestRefusalsAreSummedUp(t *testing.T) {
	n := newNewsroom(t, "", "api", "login")
	n.refuse("api", 1, ReasonLimited)
	n.refuse("api", 1, ReasonLimited)
	n.refuse("api", 2, ReasonLimited)
	n.refuse("login", 1, ReasonUnavailable)
	n.refuse("api", 1, ReasonBlocked)
	n.wrote("first refusals", `
refused zone=api reason=limited wait=1.5s
refused zone=api reason=limited wait=1.5s
refused zone=login reason=unavailable wait=1.5s`)
	n.wait(6 * time.Second)
	n.wrote("within the period", "")
	n.wait(time.Second)
	n.wrote("at its end", `
refusals zone=api limited=3 blocked=1 clients=2 suppressed=0
refusals zone=login unavailable=1 clients=1 suppressed=0`)
	if n.due != 0 {
		t.Error("a timer is set although there is nothing to say")
	}
	n.wait(time.Hour)
	n.wrote("when nobody comes", "")
	n.refuse("api", 1, ReasonLimited)
	n.wait(9 * time.Minute)
	n.wrote("an hour later", "refused zone=api reason=limited wait=1.5s\nrefusals zone=api limited=1 clients=1 suppressed=0")
	n.refuse("api", 1, ReasonLimited)
	n.wait(10 * time.Second)
	n.wrote("within ten minutes", "refusals zone=api limited=1 clients=1 suppressed=0")
}

// Ten lines a second, and twenty at once; what is left out is counted.
func TestRefusedLinesAreBounded(t *testing.T) {
	n := newNewsroom(t, "", "api")
	before := suppressedLines.Load()
	for i := range 1000 {
		n.refuse("api", i, ReasonLimited)
	}
	if got := strings.Count(n.lines(), "refused "); got != 20 {
		t.Errorf("%d lines at once, want 20", got)
	}
	for i := range 5000 { // in five seconds, all in the same period
		n.wait(time.Millisecond)
		n.refuse("api", 1000+i, ReasonLimited)
	}
	if got := strings.Count(n.lines(), "refused "); got != 50 {
		t.Errorf("%d lines in 5 s, want 50", got)
	}
	n.wait(10 * time.Second)
	n.wrote("the rest", "refusals zone=api limited=6000 clients=6000 suppressed=5930")
	if got := suppressedLines.Load() - before; got != 5930 {
		t.Errorf("%d suppressed lines in the process, want 5930", got)
	}
}

// A block has a line each time, but not so many that they fill the disk.
func TestBlockedLinesAreBounded(t *testing.T) {
	n := newNewsroom(t, "off", "api")
	for i := range 1000 {
		c := client("api", i)
		d := Decision{Reason: ReasonBlocked, Zone: "api", Now: n.micros, RetryAfter: 2 * time.Minute, BlockStarted: true, Strikes: 4}
		n.decided(requestFrom("203.0.113.9"), []Charge{c}, &d)
	}
	lines := strings.Split(n.lines(), "\n")
	if len(lines) != 200 || lines[0] != "blocked zone=api strikes=4 duration=2m0s" {
		t.Errorf("%d lines like %q, want 200", len(lines), lines[0])
	}
	n.wait(10 * time.Second)
	n.wrote("the rest, although refusals are not written about", "refusals zone=api clients=0 suppressed=800")
}

func TestRefusalsAtALevel(t *testing.T) {
	for level, want := range map[string]string{"warn": "warn warn", "error": "error error", "": "info info", "debug": "", "off": ""} {
		n := newNewsroom(t, level, "api")
		before := suppressedLines.Load()
		for range 100 {
			n.refuse("api", 1, ReasonLimited)
		}
		n.wait(10 * time.Second)
		var levels []string
		for _, entry := range n.written.TakeAll() {
			levels = append(levels, entry.Level.String())
		}
		if got := strings.Join(levels, " "); got != want {
			t.Errorf("log_refusals %q: lines at %q, want %q", level, got, want)
		}
		if suppressedLines.Load() != before {
			t.Errorf("log_refusals %q: lines count as suppressed", level)
		}
	}
	if _, err := newJournal(&Handler{LogRefusals: "loud"}, processBook); err == nil || err.Error() != `log_refusals: must be off, debug, info, warn or error, got "loud"` {
		t.Errorf("got %v", err)
	}
}

// What could not be charged belongs to no zone.
func TestUnchargedRefusalsAreSummedUp(t *testing.T) {
	n := newNewsroom(t, "", "api")
	n.unclaimed(errEarlyData)
	n.unclaimed(errNoAddress)
	n.unclaimed(errIdentityRequired)
	n.unclaimed(errIdentityRequired)
	n.unclaimed(errors.New("a matcher failed"))
	n.wait(10 * time.Second)
	n.wrote("at the end", "refusals unavailable=1 identity_required=2 too_early=1 clients=0 suppressed=0")
}

// Shedding begins with a line and ends with one, however often it stops in between for less than ten seconds.
func TestSheddingBeginsAndEnds(t *testing.T) {
	n := newNewsroom(t, "", "api")
	n.h.pool.take(7)
	for range 35 { // for 34 s
		n.overloaded()
		n.wait(time.Second)
	}
	n.wait(8 * time.Second)
	n.overloaded()
	n.wait(8 * time.Second)
	n.wrote("while it sheds", `
shedding pool=uploads in_flight=1 max_in_flight=7
refusals pool=uploads overloaded=7 clients=0 suppressed=0
refusals pool=uploads overloaded=10 clients=0 suppressed=0
refusals pool=uploads overloaded=10 clients=0 suppressed=0
refusals pool=uploads overloaded=8 clients=0 suppressed=0
refusals pool=uploads overloaded=1 clients=0 suppressed=0`)
	n.wait(12 * time.Second)
	n.wrote("after", "shedding ended pool=uploads shed=36 duration=43s")
	n.wait(time.Hour)
	if n.due != 0 {
		t.Error("a timer is set although there is nothing to say")
	}
	n.overloaded()
	n.wrote("again", "shedding pool=uploads in_flight=1 max_in_flight=7")
}

// A reload in the middle of a period loses nothing, and what comes after it is written by the configuration that runs.
func TestSummariesOverReloads(t *testing.T) {
	n := newNewsroom(t, "", "api")
	n.refuse("api", 1, ReasonLimited)
	n.lines()
	old := n.journal
	core, written := observer.New(zapcore.InfoLevel)
	next := &Handler{app: new(App), logger: zap.New(core), zones: old.h.zones}
	n.journal = n.of(next)
	n.refuse("api", 1, ReasonLimited)
	old.decided(requestFrom("203.0.113.9"), []Charge{client("api", 2)}, &Decision{Reason: ReasonLimited, Zone: "api"}) // a late one
	app := started(t, &App{requests: emitter{log: next.logger}})
	t.Cleanup(func() { stopped(t, app) })
	n.lines()
	n.wait(10 * time.Second)
	n.wrote("the old configuration", "")
	n.written = written
	n.wrote("the new one", "refusals zone=api limited=3 clients=2 suppressed=0")
}

// Clients are remembered in a fixed piece of memory: those that come at the same time, for ten minutes.
func TestRecentClients(t *testing.T) {
	c := newLogbook(processMicros, nil)
	zone, other := c.recent.of("a"), c.recent.of("b")
	id := client("a", 1).ID
	now := 5 * journalPeriod
	for _, step := range []struct {
		after int64 // periods
		zone  uint64
		want  refusedClient
		why   string
	}{
		{0, zone, refusedClient{first: true}, "never seen"},
		{0, zone, refusedClient{counted: true}, "just seen"},
		{0, other, refusedClient{first: true}, "in another zone"},
		{1, zone, refusedClient{}, "in the next period"},
		{-1, zone, refusedClient{counted: true}, "by a clock that was read before"},
		{1 + recentPeriods, zone, refusedClient{}, "ten minutes later"},
		{recentPeriods + 1, zone, refusedClient{first: true}, "more than ten minutes later"},
	} {
		now += step.after * journalPeriod
		got := c.recent.see(now, step.zone, &id)
		if got.first != step.want.first || got.counted != step.want.counted {
			t.Errorf("%s: %+v, want %+v", step.why, got, step.want)
		}
	}
	forgotten := 0
	for i := range recentSlots / 4 {
		id := client("a", i).ID
		c.recent.see(now, zone, &id)
	}
	for i := range recentSlots / 4 {
		id := client("a", i).ID
		if c.recent.see(now, zone, &id).first {
			forgotten++
		}
	}
	if forgotten > recentSlots/4/50 {
		t.Errorf("%d of %d clients were forgotten", forgotten, recentSlots/4)
	}
}
