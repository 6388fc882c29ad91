package bench

import (
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// microTable runs the benchmarks of the module itself, which measure a decision without HTTP around it.
func microTable(t testing.TB) string {
	t.Helper()
	output, err := exec.Command("go", "test", "-run", "^$", "-bench", ".", "-benchmem", "-benchtime", "300ms", "../..").CombinedOutput()
	if err != nil {
		t.Errorf("running the benchmarks: %v\n%s", err, output)
		return ""
	}
	benchmarks := table{head: []string{"Benchmark", "also", "ns", "bytes allocated", "allocations"}}
	for line := range strings.Lines(string(output)) {
		if row, ok := parseBenchmark(line); ok {
			benchmarks.add(row...)
		}
	}
	return benchmarks.String()
}

// parseBenchmark reads a line like "BenchmarkTake-2  100  12.5 ns/op  8 B/op  1 allocs/op"; values of other units are the second
// cell.
func parseBenchmark(line string) (row []string, ok bool) {
	fields := strings.Fields(line)
	if len(fields) < 4 || len(fields)%2 != 0 || !strings.HasPrefix(fields[0], "Benchmark") {
		return nil, false
	}
	name := strings.TrimPrefix(fields[0], "Benchmark")
	if i := strings.LastIndexByte(name, '-'); i >= 0 {
		name = name[:i]
	}
	row = []string{name, "", "", "", ""}
	places := map[string]int{"ns/op": 2, "B/op": 3, "allocs/op": 4}
	for i := 2; i < len(fields); i += 2 {
		if _, err := strconv.ParseFloat(fields[i], 64); err != nil {
			return nil, false
		}
		if at, known := places[fields[i+1]]; known {
			row[at] = fields[i]
		} else {
			row[1] = strings.TrimSpace(row[1] + " " + fields[i] + " " + fields[i+1])
		}
	}
	return row, true
}

// bytesTable tells what a client takes in Redis.
func bytesTable(t testing.TB) string {
	t.Helper()
	redis := redistest.Start(t)
	n := node.Start(t, caddyfile(hello), node.Env("REDIS", redis.Addr()))
	sizes := table{head: []string{"A client in Redis", "", "bytes", "more"}}
	last := int64(0)
	for _, row := range []struct {
		what, penalty string
		zones         int
	}{{"one zone", "", 1}, {"and a strike record", "penalty\n", 1}, {"and a second zone", "penalty\n", 2}, {"and a third", "penalty\n", 3}} {
		size := bytesOfClient(t, redis, n, row.penalty, row.zones)
		sizes.add(row.what, "", strconv.FormatInt(size, 10), fmt.Sprintf("%+d", size-last))
		last = size
	}
	return sizes.String()
}

// bytesOfClient returns the size of the key of a client that was refused once.
func bytesOfClient(t testing.TB, redis *redistest.Server, n *node.Node, penalty string, zones int) int64 {
	t.Helper()
	rest := shared + penalty
	for i := range zones {
		rest += zone("api"+strconv.Itoa(i), byKey+tiny)
	}
	if err := n.Load(caddyfile(limit(rest, "") + hello)); err != nil {
		t.Fatal(err)
	}
	redis.Do("flushall")
	fields := int64(zones)
	if penalty != "" {
		fields++
	}
	// The first requests may be decided without Redis, which is being connected.
	var key string
	proc.Eventually(t, "the client has a bucket for each zone, and a strike record if there are penalties", func() bool {
		n.Get("/", "X-Key: alice")
		key = keyOfClient(redis)
		return key != "" && redis.Do("hlen", key) == fields
	})
	size, _ := redis.Do("memory", "usage", key).(int64)
	return size
}

// keyOfClient returns the only key with the hash of a client, 22 letters long, in braces; other keys are the limiter's own.
func keyOfClient(redis *redistest.Server) string {
	keys := slices.DeleteFunc(redis.Keys(), func(key string) bool { return len(key) != len("tollgate:{}")+22 })
	if len(keys) != 1 {
		return ""
	}
	return keys[0]
}
