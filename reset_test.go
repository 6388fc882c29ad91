package ratelimit

import (
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// A reset fills the bucket up to what is leased of it: bucket and leases together are never more than the burst. A key of another
// type is left alone; no key loses its TTL.
func TestResetCountsLeases(t *testing.T) {
	server := redistest.Start(t)
	client := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer client.Close()
	script, now := scripted{client, "tollgate"}, int64(1_764_550_000_000_000)
	reset := func(c *Charge) int {
		t.Helper()
		had, err := client.Eval(context.Background(), resetScript, []string{identityKey("tollgate", c.ID)}, "z"+c.Zone).Int()
		if err != nil {
			t.Fatal(err)
		}
		return had
	}
	left := func(why string, c Charge, want int64) {
		t.Helper()
		if got := script.peek(t, now, []Charge{c})[0].tokens; got != want*Token && got != want*Token+2 { // which is what flows in
			t.Errorf("%s: %d millionths, want %d tokens", why, got, want)
		}
	}
	leased, plain := limited("leased", 1, "1/day", 100), limited("plain", 2, "1/day", 100)
	leased.Cost, plain.Cost = 60*Token, 60*Token
	if had := reset(&leased); had != 0 {
		t.Error("there was a bucket before there was one")
	}
	leased.Ask = 10 * Token
	script.take(t, now, []Charge{leased, plain})
	left("after a request and a lease", leased, 30)
	left("after a request", plain, 40)
	if reset(&leased) != 1 || reset(&plain) != 1 {
		t.Error("there were no buckets")
	}
	left("a reset beside a lease", leased, 90)
	left("a reset", plain, 100)
	now += 2 * leasePeriod
	left("what was leased is used or lost", leased, 90)
	slow := limited("plain", 2, "1/day", 1000)
	left("under a larger burst", slow, 1000)
	for key, ttl := range server.TTLs() {
		if ttl < time.Minute {
			t.Errorf("%s lives for %s", key, ttl)
		}
	}
	server.Do("set", identityKey("tollgate", ID{3}), "no hash")
	if other := limited("plain", 3, "1/h", 1); reset(&other) != 0 || server.Do("get", identityKey("tollgate", ID{3})) != "no hash" {
		t.Error("a key of another type was taken for a bucket")
	}
}
