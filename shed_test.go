package ratelimit

import (
	"net/http"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
)

func TestShedDefaults(t *testing.T) {
	s := new(Shed)
	if err := s.provision(); err != nil {
		t.Fatal(err)
	}
	if want := (Shed{MaxInFlight: 100, Pool: "default", RetryAfter: caddy.Duration(5 * time.Second)}); *s != want {
		t.Errorf("got %+v, want %+v", *s, want)
	}
}

func TestShedKeepsWhatIsSet(t *testing.T) {
	want := Shed{MaxInFlight: 1, Pool: "api-v2_x.y", RetryAfter: caddy.Duration(time.Second)}
	s := want
	if err := s.provision(); err != nil {
		t.Fatal(err)
	}
	if s != want {
		t.Errorf("got %+v, want %+v", s, want)
	}
}

func TestShedRefusesWhatCannotBe(t *testing.T) {
	for _, row := range []struct {
		shed Shed
		want string
	}{

		{Shed{Pool: "two words"}, `shed: pool: must be 1 to 64 letters, digits and any of -_., got "two words"`},
		{Shed{Pool: "{env.POOL}"}, `shed: pool: must be 1 to 64 letters, digits and any of -_., got "{env.POOL}"`},
		{Shed{Pool: "a\n"}, `shed: pool: must be 1 to 64 letters, digits and any of -_., got "a\n"`},
		{Shed{RetryAfter: caddy.Duration(999 * time.Millisecond)}, `shed: retry_after: must be at least 1s, got 999ms`},
		{Shed{RetryAfter: -1}, `shed: retry_after: must be at least 1s, got -1ns`},
	} {
		if err := row.shed.provision(); err == nil || err.Error() != row.want {
			t.Errorf("got  %v\nwant %s", err, row.want)
		}
	}
}

func TestShedDefinitionsDiffer(t *testing.T) {
	for _, row := range []struct {
		why  string
		a, b Shed
		want []string
	}{
		{"the same", Shed{MaxInFlight: 5}, Shed{MaxInFlight: 5}, nil},
		{"the default written out", Shed{}, Shed{MaxInFlight: 100}, nil},
		{"another number", Shed{}, Shed{MaxInFlight: 5}, []string{"max_in_flight"}},
		{"what the client is told is each handler's own", Shed{}, Shed{RetryAfter: caddy.Duration(time.Minute)}, nil},
	} {
		if got := row.a.differs(&row.b); !slices.Equal(got, row.want) {
			t.Errorf("%s: differs in %v, want %v", row.why, got, row.want)
		}
		if got := row.b.differs(&row.a); !slices.Equal(got, row.want) {
			t.Errorf("%s, the other way: differs in %v, want %v", row.why, got, row.want)
		}
	}
}

func acquired(t *testing.T, name string) *slotPool {
	t.Helper()
	p, err := acquirePool(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { releasePool(name) })
	return p
}

func holds(t *testing.T, p *slotPool, want int64) {
	t.Helper()
	if got := p.inFlight(); got != want {
		t.Errorf("%d slots are taken, want %d", got, want)
	}
}

func TestPoolIsOneCounterByName(t *testing.T) {
	a, b, other := acquired(t, t.Name()), acquired(t, t.Name()), acquired(t, t.Name()+"/other")
	if a != b {
		t.Error("one name, two counters")
	}
	if a == other {
		t.Error("two names, one counter")
	}
}

func TestPoolSurvivesReloads(t *testing.T) {
	name := t.Name()
	old, err := acquirePool(name)
	if err != nil {
		t.Fatal(err)
	}
	old.take(10)
	for range 1000 {
		p, err := acquirePool(name) // the new configuration's Provision
		if err != nil {
			t.Fatal(err)
		}
		releasePool(name) // the old one's Cleanup
		if p != old {
			t.Fatal("a reload lost the counter")
		}
	}
	holds(t, old, 1)
	if refs, _ := slotPools.References(name); refs != 1 {
		t.Errorf("%d references after the reloads, want 1", refs)
	}
	releasePool(name)
	if _, exists := slotPools.References(name); exists {
		t.Error("the pool outlives its last handler")
	}
	old.release() // the request that outlived it
	holds(t, old, 0)
}

func TestLimitTravelsWithTheCall(t *testing.T) {
	p := new(slotPool)
	for i := range int64(3) {
		if !p.take(3) {
			t.Fatalf("slot %d of 3 refused", i+1)
		}
	}
	if p.take(3) {
		t.Error("a fourth slot of 3")
	}
	if p.take(2) {
		t.Error("a slot under a limit that was lowered below what is taken")
	}
	if !p.take(4) {
		t.Error("a raised limit acts only later")
	}
	holds(t, p, 4)
}

// crowd runs work in so many goroutines that start together, and waits for all of them.
func crowd(n int, work func(i int)) {
	var ready, done sync.WaitGroup
	start := make(chan struct{})
	for i := range n {
		ready.Add(1)
		done.Go(func() {
			ready.Done()
			<-start
			work(i)
		})
	}
	ready.Wait()
	close(start)
	done.Wait()
}

func TestExactlyTheLimitIsAdmitted(t *testing.T) {
	const goroutines, limit = 1000, 10
	p := new(slotPool)
	var admitted, asked atomic.Int64
	all := make(chan struct{})
	crowd(goroutines, func(int) {
		ok := p.take(limit)
		if asked.Add(1) == goroutines {
			close(all)
		}
		if !ok {
			return
		}
		defer p.release()
		admitted.Add(1)
		<-all // nobody leaves before everybody has asked
	})
	if got := admitted.Load(); got != limit {
		t.Errorf("%d of %d were admitted at once, want %d", got, goroutines, limit)
	}
	holds(t, p, 0)
}

func TestNeverOneMore(t *testing.T) {
	const goroutines, limit, rounds = 1000, 10, 50
	p := new(slotPool)
	var inside, most, admitted atomic.Int64
	ways := []func(){
		func() {},
		func() { panic(http.ErrAbortHandler) },
		runtime.Goexit,
		func() { panic("a bug in a handler") },
	}
	serve := func(leave func()) {
		defer func() { _ = recover() }()
		if !p.take(limit) {
			return
		}
		defer p.release()
		defer inside.Add(-1)
		now := inside.Add(1)
		for m := most.Load(); now > m && !most.CompareAndSwap(m, now); m = most.Load() {
		}
		if n := p.inFlight(); n < 1 || n > limit {
			t.Errorf("%d slots are taken, as seen by a request with a slot of %d", n, limit)
		}
		admitted.Add(1)
		runtime.Gosched()
		leave()
	}
	crowd(goroutines, func(i int) {
		for round := range rounds {
			way := ways[(i+round)%len(ways)]
			var one sync.WaitGroup
			one.Go(func() { serve(way) }) // Goexit ends the goroutine that it is called in
			one.Wait()
		}
	})
	if most.Load() > limit {
		t.Errorf("%d were inside at once, want at most %d", most.Load(), limit)
	}
	if admitted.Load() < limit {
		t.Errorf("only %d were admitted in all: this test shows nothing", admitted.Load())
	}
	holds(t, p, 0)
}

func TestFullPoolCostsNothing(t *testing.T) {
	p := new(slotPool)
	p.take(1)
	if n := testing.AllocsPerRun(100, func() { p.take(1) }); n != 0 {
		t.Errorf("a refusal allocates %v times", n)
	}
}

func BenchmarkTakeFull(b *testing.B) {
	p := new(slotPool)
	p.take(1)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if p.take(1) {
				b.Error("admitted")
			}
		}
	})
}

func BenchmarkTakeAndRelease(b *testing.B) {
	p := new(slotPool)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if p.take(1 << 20) {
				p.release()
			}
		}
	})
}
