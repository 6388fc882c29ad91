package ratelimit

import (
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// To a server next door one batch is under way at a time, to one that is far away several, and a busy moment changes nothing.
func TestLaneKnowsHowFarAwayTheServerIs(t *testing.T) {
	for _, test := range []struct {
		name  string
		trips []int64 // µs
		want  int
	}{
		{"nothing known", nil, 1},
		{"next door", []int64{90, 120, 100}, 1},
		{"a connection had to be opened", []int64{30_000, 120}, 1},
		{"a busy moment", []int64{100, 2_000, 3_000, 2_000, 110}, 1},
		{"another zone", []int64{1_000, 1_100, 990}, 3},
		{"another continent", []int64{80_000, 81_000}, maxFlights},
		{"a stall", []int64{100, 50_000, 50_000, 50_000, 50_000}, 1},
	} {
		l := lane{most: maxFlights}
		for _, took := range test.trips {
			l.arrived(took)
		}
		if got := l.allowed(); got != test.want {
			t.Errorf("%s: %d batches under way, want %d", test.name, got, test.want)
		}
	}
	moved := lane{most: maxFlights}
	for range 100 { // a failover to another zone
		moved.arrived(100)
	}
	trips := 0
	for ; moved.allowed() == 1 && trips < 100; trips++ {
		moved.arrived(1_000)
	}
	if trips < 10 || trips > 40 {
		t.Errorf("after %d round trips of another length the lane believes it, want 10 to 40", trips)
	}
}

// Who comes while a batch is on its way to a Redis that is far away does not wait for its return.
func TestFarRedisIsAskedBeforeItHasAnswered(t *testing.T) {
	server := redistest.Start(t)
	proxy := redistest.NewProxy(t, server.Addr())
	n := node.Start(t, site(patientRedis+"nodes 1", "zone api {\n rate 1/h\n burst 10\n}"), node.Env("REDIS", proxy.Addr()))
	proc.Eventually(t, "Redis is up", func() bool { return n.LogLines("redis is up") == 1 })
	proxy.SetDelay(20 * time.Millisecond)
	n.Get("/") // the lane learns how far away it is
	proxy.SetDelay(2 * time.Second)
	before, answered := proxy.Requests(), make(chan struct{}, 3)
	for range 3 {
		go func() {
			n.Get("/")
			answered <- struct{}{}
		}()
	}
	proc.Eventually(t, "all are on their way", func() bool { return proxy.Requests() == before+3 })
	if len(answered) > 0 {
		t.Error("one was answered before all were sent: this shows nothing")
	}
	for range 3 {
		<-answered
	}
}
