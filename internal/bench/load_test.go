package bench

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
)

// counted is a server that answers every tenth request with 429, and counts the keys.
func counted(t *testing.T) (s *site, keys func() map[string]int) {
	t.Helper()
	var mu sync.Mutex
	seen, requests := map[string]int{}, 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		seen[r.Header.Get("X-Key")]++
		if requests++; requests%10 == 0 {
			w.WriteHeader(http.StatusTooManyRequests)
		}
	}))
	t.Cleanup(server.Close)
	return &site{addr: strings.TrimPrefix(server.URL, "http://"), path: "/", status: 200}, func() map[string]int {
		mu.Lock()
		defer mu.Unlock()
		return seen
	}
}

func TestLoad(t *testing.T) {
	s, keys := counted(t)
	marks := 0
	got, err := load{conns: 3, keys: 5}.run(s, 20*time.Millisecond, 100*time.Millisecond, func() { marks++ })
	if err != nil {
		t.Fatal(err)
	}
	all := 0
	for _, n := range keys() {
		all += n
	}
	if len(keys()) != 5 || keys()["0000004"] == 0 {
		t.Errorf("got the keys %v, want 5", keys())
	}
	if marks != 2 || got.elapsed < 100*time.Millisecond || got.requests < 10 || got.requests >= int64(all) {
		t.Errorf("%d requests in %s of %d, %d marks; want fewer than all, since some warmed up, and two marks", got.requests, got.elapsed, all, marks)
	}
	if part := float64(got.odd) / float64(got.requests); part < 0.05 || part > 0.15 || got.oddStatus != 429 {
		t.Errorf("%d of %d answers had another status, one of them %d; want a tenth, 429", got.odd, got.requests, got.oddStatus)
	}
	if p := got.latency.quantile(0.5); p <= 0 || p > 50*time.Millisecond {
		t.Errorf("median %s", p)
	}
}

// The next round goes on with the keys where the last one ended.
func TestLoadGoesOn(t *testing.T) {
	s, keys := counted(t)
	for range 2 {
		if _, err := (load{conns: 1, keys: 1_000_000}).run(s, 0, 30*time.Millisecond, func() {}); err != nil {
			t.Fatal(err)
		}
	}
	for key, n := range keys() {
		if n != 1 {
			t.Errorf("%s was sent %d times", key, n)
		}
	}
	if len(keys()) != s.turn {
		t.Errorf("%d keys, and the next one is %d", len(keys()), s.turn)
	}
}

func TestLoadKeepsPace(t *testing.T) {
	s, _ := counted(t)
	got, err := load{conns: 4, keys: 5, pace: 200}.run(s, 0, 500*time.Millisecond, func() {})
	if err != nil || got.requests < 50 || got.requests > 104 {
		t.Errorf("%d requests in half a second at 200 a second, error %v", got.requests, err)
	}
}

func TestLoadWithoutServer(t *testing.T) {
	s, _ := counted(t)
	s.addr = "127.0.0.1:1"
	if _, err := (load{conns: 1, keys: 1}).run(s, 0, 0, func() {}); err == nil {
		t.Error("no error")
	}
}
