package ratelimit

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// BenchmarkScript reports what a decision costs Redis, in batches as they come with few and with many requests at once. What it
// says of a whole request is in internal/bench.
func BenchmarkScript(b *testing.B) {
	limits := map[string]Limit{"10 per h": limit(b, "10/h", 1000), "1000 per min": limit(b, "1000/m", 1000)}
	for name, l := range limits {
		for _, size := range []int{1, 4, 24} {
			b.Run(fmt.Sprintf("%s batch %d", name, size), func(b *testing.B) { benchmarkScript(b, l, size) })
		}
	}
}

func benchmarkScript(b *testing.B, l Limit, size int) {
	server := redistest.Start(b)
	client := redis.NewClient(&redis.Options{Addr: server.Addr(), Protocol: 2})
	defer client.Close()
	server.Do("script", "load", bucketScript)
	before := cpu(b, server)
	decisions := 0
	for b.Loop() {
		pipe := client.Pipeline()
		for range 10 {
			var all batch
			for range size {
				all.add("tollgate", zone("api", l).by(uint64(rand.IntN(100_000))).together())
			}
			decisions += size
			_ = pipe.Process(b.Context(), all.command("evalsha", bucketSHA, ""))
		}
		if _, err := pipe.Exec(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64((cpu(b, server)-before).Nanoseconds())/1000/float64(decisions), "redis-µs/decision")
	b.ReportMetric(float64(server.Calls("pexpire"))/float64(decisions), "pexpire/decision")
}

func cpu(b *testing.B, s *redistest.Server) time.Duration {
	used, err := proc.CPU(s.Pids())
	if err != nil {
		b.Fatal(err)
	}
	return used
}
