package ratelimit

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// This file holds docs/redis.md to the code and to a real Redis: every number in it is one of the code, or measured here.

const redisDocs = "docs/redis.md"

// redisDoc returns the text of docs/redis.md, on one line.
func redisDoc(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(redisDocs)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(strings.Fields(string(text)), " ")
}

func TestRedisDocsNumbers(t *testing.T) {
	doc := redisDoc(t)
	for _, says := range []string{
		fmt.Sprintf("`pool_size` (%d)", defaultPoolSize),
		fmt.Sprintf("%d to %d are open at rest", warmConns, mostAtRest),
		fmt.Sprintf("40 nodes open %d connections at rest and %d at most", 40*mostAtRest, 40*defaultPoolSize),
		fmt.Sprintf("about %d MB", (documentedBytes(t, "all in all, a client with one zone")+25)/50*50),
		fmt.Sprintf("`timeout` (%d ms)", defaultTimeout.Milliseconds()),
		fmt.Sprintf("`sensitive_timeout` (%d ms)", defaultSensitiveTimeout.Milliseconds()),
		"`prefix` (`" + defaultPrefix + "`)",
		fmt.Sprintf("at most %d 000", maxListed/1000),
		fmt.Sprintf("announces itself every %.0f s", nodesBeat.Seconds()),
		fmt.Sprintf("for %.0f s", nodesLife.Seconds()),
		fmt.Sprintf("Blocks are asked about again every %d s", recheckEvery/1_000_000),
		fmt.Sprintf("after %d in a row", tripAfter),
		fmt.Sprintf("about every %d ms", probeMax.Milliseconds()),
		fmt.Sprintf("waits up to %.0f s", connectGrace.Seconds()),
		fmt.Sprintf("at most %d requests", maxBatch),
		fmt.Sprintf("beyond %d waiting", maxQueued),
		fmt.Sprintf("once in %.0f s", complainEvery.Seconds()),
	} {
		if !strings.Contains(doc, says) {
			t.Errorf("the docs do not say %q", says)
		}
	}
	for code := range repliesOf {
		if !strings.Contains(doc, code) {
			t.Errorf("the docs do not say what happens at %s", code)
		}
	}
}

// What the docs quote from the log is what is logged.
func TestRedisDocsLogLines(t *testing.T) {
	doc, code := redisDoc(t), ""
	files, err := filepath.Glob("redis*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasSuffix(file, "_test.go") {
			code += string(text)
		}
	}
	for _, message := range []string{
		"redis is up", "redis is up again", "redis is down, deciding without it", "redis cannot be reached, deciding without it",
		"redis refused the script, deciding without it", "deleted a key that is not ours", "nodes cannot be counted, the last number holds",
	} {
		if !strings.Contains(code, `"`+message+`"`) || !strings.Contains(doc, "`"+message+"`") {
			t.Errorf("%q is not both in the code and in the docs", message)
		}
	}
}

// documentedBytes returns a number that stands in a row of a table of the docs.
func documentedBytes(t *testing.T, row string) int64 {
	t.Helper()
	found := regexp.MustCompile(`\| ` + regexp.QuoteMeta(row) + ` \| (\d+) \|`).FindStringSubmatch(redisDoc(t))
	if found == nil {
		t.Fatalf("no row %q", row)
	}
	n, err := strconv.ParseInt(found[1], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// The bytes of a client are those in the docs. Another Redis or allocator may round them otherwise.
func TestRedisDocsMemory(t *testing.T) {
	server := redistest.Start(t)
	store := dialRedis(t, server.Addr(), 5*time.Second, 5*time.Second)
	same := func(row string, got int64) {
		t.Helper()
		t.Logf("%s: %d", row, got)
		if want := documentedBytes(t, row); got < want-want/8 || got > want+want/8 {
			t.Errorf("%s: %d bytes, the docs say %d", row, got, want)
		}
	}
	usage := func(key string) int64 {
		t.Helper()
		n, _ := server.Do("memory", "usage", key, "samples", 0).(int64)
		return n
	}
	take := func(charges ...Charge) {
		t.Helper()
		if _, err := store.Take(context.Background(), charges); err != nil {
			t.Fatal(err)
		}
	}
	slow := func(zone string, id uint64) Charge {
		c := testCharge(zone, 2)
		c.ID, c.Limit.Num, c.Limit.Den = testID(id), 1, 3600
		return c
	}
	take(slow("api1", 1))
	one := usage(store.key(testID(1)))
	same("one zone", one)
	zones := []Charge{slow("api1", 2)}
	for i := 2; i <= 5; i++ {
		zones = append(zones, slow("api"+strconv.Itoa(i), 2))
	}
	take(zones...)
	same("each further zone", (usage(store.key(testID(2)))-one)/4)

	struck := slow("api1", 3)
	struck.Penalty = rules()
	for range 3 {
		take(struck)
	}
	same("a strike record", usage(store.key(testID(3)))-one)
	for field, bytes := range map[string]int64{"zapi1": 23, "p" + struck.Penalty.group: 17} {
		if n := server.Do("hstrlen", store.key(testID(3)), field); n != bytes {
			t.Errorf("field %s: %v bytes, the docs say %d", field, n, bytes)
		}
		if !strings.Contains(redisDoc(t), fmt.Sprintf("| %d bytes |", bytes)) {
			t.Errorf("no field of %d bytes in the docs", bytes)
		}
	}
	if !strings.Contains(bucketScript, "#raw == 37") || !strings.Contains(redisDoc(t), "37 bytes while tokens") {
		t.Error("a bucket with leases is not as long as the docs say")
	}
	blocks := make([]any, 0, 2002)
	blocks = append(blocks, "zadd", store.listKey())
	for i := range 1000 {
		blocks = append(blocks, 1_796_097_660_000+i, member(knownBlock{id: testID(uint64(i))}))
	}
	server.Do(blocks...)
	same("a block in the list", usage(store.listKey())/1000)

	const clients = 20_000
	before := usedMemory(t, server)
	many := make([]Charge, clients)
	for i := range many {
		many[i] = slow("api1", uint64(1000+i))
	}
	fill(t, server, many)
	same("all in all, a client with one zone", (usedMemory(t, server)-before)/clients)
}

func usedMemory(t *testing.T, server *redistest.Server) int64 {
	t.Helper()
	n, err := strconv.ParseInt(server.Info("memory", "used_memory"), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// fill takes each of the charges, many in a call.
func fill(t *testing.T, server *redistest.Server, charges []Charge) {
	t.Helper()
	client := redis.NewClient(&redis.Options{Addr: server.Addr(), Protocol: 2, DisableIdentity: true, ReadTimeout: time.Minute})
	defer client.Close()
	for len(charges) > 0 {
		var b batch
		n := min(len(charges), 1000)
		for i := range charges[:n] {
			b.add(defaultPrefix, charges[i:i+1])
		}
		cmd := b.command("eval", bucketScript, "")
		if err := client.Process(context.Background(), cmd); err != nil {
			t.Fatal(err)
		}
		charges = charges[n:]
	}
}

// mostAtRest is how many connections stay open: those that are kept ready, and those that the first calls opened meanwhile.
const mostAtRest = warmConns + 2

// Who has nothing to do keeps so many connections open as the docs say.
func TestRedisDocsConnections(t *testing.T) {
	server := redistest.Start(t)
	store := dialRedis(t, server.Addr(), 5*time.Second, 5*time.Second)
	c := testCharge("api", 10)
	for _, c.Patient = range []bool{false, true} {
		if _, err := store.Take(context.Background(), []Charge{c}); err != nil {
			t.Fatal(err)
		}
	}
	rests(t, server)
}

// rests makes sure that the client of the test keeps as many connections to a server as the docs say.
func rests(t *testing.T, server *redistest.Server) {
	t.Helper()
	connected := func() int {
		list, _ := server.Do("client", "list", "type", "normal").(string)
		return strings.Count(list, "\n") - 1 // without the one of the assertions
	}
	proc.Eventually(t, "connections are open", func() bool { return connected() >= warmConns })
	time.Sleep(300 * time.Millisecond)
	if n := connected(); n < warmConns || n > mostAtRest {
		t.Errorf("%d connections at rest, want %d to %d", n, warmConns, mostAtRest)
	}
}
