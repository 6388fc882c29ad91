package ratelimit

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
)

// arrival is a request at a handler, which can be made again.
type arrival struct {
	handler *Handler
	writer  sink
	request *http.Request
	next    caddyhttp.Handler
}

// newArrival returns a request to a handler with zones.
func newArrival(t testing.TB, zones map[string]*Zone) *arrival {
	t.Helper()
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	t.Cleanup(cancel)
	h := &Handler{app: provisionedApp(t), logger: zap.NewNop(), answers: *answering()}
	h.limiter, _ = newTestLimiter(nil, 1)
	h.watch = watcher{h}
	for _, name := range sortedNames(zones) {
		if err := zones[name].provision(ctx, name); err != nil {
			t.Fatal(err)
		}
		h.zones = append(h.zones, zones[name])
	}
	var err error
	if h.journal, err = newJournal(h, newLogbook(processMicros, func(time.Duration, func()) {})); err != nil {
		t.Fatal(err)
	}
	w := sink{}
	r := caddyhttp.PrepareRequest(httptest.NewRequest("GET", "/", nil), caddy.NewReplacer(), httptest.NewRecorder(), nil)
	caddyhttp.SetVar(r.Context(), caddyhttp.ClientIPVarKey, "203.0.113.9")
	next := caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil })
	return &arrival{h, w, r, next}
}

// again passes the request through the handler, as if it were new.
func (a *arrival) again(t testing.TB) {
	caddyhttp.SetVar(a.request.Context(), progressVar, nil)
	if err := a.handler.ServeHTTP(a.writer, a.request, a.next); err != nil {
		t.Fatal(err)
	}
}

func zoneOf(t testing.TB, rate string) *Zone {
	t.Helper()
	r, err := ParseRate(rate)
	if err != nil {
		t.Fatal(err)
	}
	return &Zone{Rate: r}
}

func BenchmarkRequestAllowed(b *testing.B) {
	a := newArrival(b, map[string]*Zone{"api": zoneOf(b, "1000000/s")})
	b.ReportAllocs()
	for b.Loop() {
		a.again(b)
	}
}

func BenchmarkRequestThreeZones(b *testing.B) {
	a := newArrival(b, map[string]*Zone{"a": zoneOf(b, "1000000/s"), "b": zoneOf(b, "1000000/s"), "c": zoneOf(b, "1000000/s")})
	b.ReportAllocs()
	for b.Loop() {
		a.again(b)
	}
}

func BenchmarkRequestRefused(b *testing.B) {
	a := newArrival(b, map[string]*Zone{"api": zoneOf(b, "1/day")})
	a.again(b)
	b.ReportAllocs()
	for b.Loop() {
		a.again(b)
	}
}
