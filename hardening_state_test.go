package ratelimit

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"pgregory.net/rapid"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

const stateEpoch = 1_764_550_000_000_000

// packedBucket is a bucket as bucket.lua stores it.
func packedBucket(version byte, tokens, at int64, num, den uint32) string {
	b := append([]byte{version}, seven(tokens)...)
	b = append(b, seven(at)...)
	b = binary.BigEndian.AppendUint32(b, num)
	return string(binary.BigEndian.AppendUint32(b, den))
}

// packedRecord is a strike record as bucket.lua stores it.
func packedRecord(version byte, strikes uint16, until, last int64) string {
	b := binary.BigEndian.AppendUint16([]byte{version}, strikes)
	return string(append(append(b, seven(until)...), seven(last)...))
}

func seven(n int64) []byte { return binary.BigEndian.AppendUint64(nil, uint64(n))[1:] }

// hostileNumbers are what a field may hold that nobody of ours has written.
var hostileNumbers = map[string]int64{
	"0": 0, "1": 1, "-1": -1, "a year ahead": stateEpoch + 365*24*3600e6, "an hour ago": stateEpoch - 3600e6,
	"2^52": 1 << 52, "2^53": 1 << 53, "2^55-1": 1<<55 - 1, "-2^55": -1 << 55,
}

// hostileFields returns, under names, values for the two fields of an identity; an empty one is left out.
func hostileFields() map[string][2]string {
	rows := map[string][2]string{}
	for name, n := range hostileNumbers {
		rows["tokens "+name] = [2]string{packedBucket(1, n, stateEpoch, 10, 1e6)}
		rows["counted at "+name] = [2]string{packedBucket(1, 0, n, 10, 1e6)}
		rows["rate num "+name] = [2]string{packedBucket(1, 0, stateEpoch-1e6, uint32(n), 1e6)}
		rows["rate den "+name] = [2]string{packedBucket(1, 0, stateEpoch-1e6, 10, uint32(n))}
		rows["both of the rate "+name] = [2]string{packedBucket(1, 0, stateEpoch-1e6, uint32(n), uint32(n))}
		rows["strikes "+name] = [2]string{"", packedRecord(1, uint16(n), 0, stateEpoch)}
		rows["until "+name] = [2]string{"", packedRecord(1, 4, n, stateEpoch)}
		rows["until without strikes "+name] = [2]string{"", packedRecord(1, 0, n, 0)}
		rows["last "+name] = [2]string{"", packedRecord(1, 4, 0, n)}
		rows["all "+name] = [2]string{packedBucket(1, n, n, uint32(n), uint32(n)), packedRecord(1, uint16(n), n, n)}
	}
	bucket, record := packedBucket(1, 0, stateEpoch, 10, 1e6), packedRecord(1, 9, stateEpoch+60e6, stateEpoch)
	for _, version := range []byte{0, 2, 49, 255} {
		rows[fmt.Sprint("version ", version)] = [2]string{string(version) + bucket[1:], string(version) + record[1:]}
	}
	for name, s := range map[string]string{"text": "garbage", "a number": "12345678901234567890", "a kilobyte": strings.Repeat("\xff", 1024), "a zero": "\x00"} {
		rows[name] = [2]string{s, s}
	}
	rows["too short"] = [2]string{bucket[:22], record[:16]}
	rows["too long"] = [2]string{bucket + "\x00", record + "\x00"}
	rows["exchanged"] = [2]string{record, bucket}
	return rows
}

// heals holds that a client is well again, whatever is stored for it: no decision is an error, no block is longer than the
// longest, and after its end, one request and one refill the bucket is full. It returns the end of that.
func heals(t rapid.TB, script scripted, now int64, c Charge) int64 {
	t.Helper()
	refill := c.Limit.wait(c.Limit.Burst)
	for range 2 { // under a block, the bucket is not looked at; the request after it mends that
		out := script.take(t, now, []Charge{c})
		if out.verdict != verdictBlocked && (out.tokens[0] < 0 || out.tokens[0] > c.Limit.Burst) {
			t.Fatalf("%d millionths left", out.tokens[0])
		}
		if out.verdict == verdictBlocked && (out.until <= now || out.until > now+c.Penalty.max) {
			t.Fatalf("blocked for %d µs, the longest is %d", out.until-now, c.Penalty.max)
		}
		now = max(now, out.until)
	}
	now += refill
	if out := script.take(t, now, []Charge{c}); out.verdict != verdictAllowed || out.tokens[0] != c.Limit.Burst-c.Cost {
		t.Fatalf("after a refill: %+v, want a full bucket less this request", out)
	}
	return now
}

func stateCharge() Charge {
	c := limited("api", 1, "10/s", 10)
	c.Penalty = defaultRules()
	return c
}

// Whatever stands in Redis, by another version, another program, a clock that jumped or by hand, is never an error and costs
// at most the longest block and a refill. Answers DESIGN §6; gateways C-1 1, 2, 3, 9, 10, 11, C-2 24, 31, C-6 76, 80; shedding d 37, 55.
func TestStoredStateIsHostile(t *testing.T) {
	server := redistest.Start(t)
	client := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer client.Close()
	ctx := context.Background()
	run := func(name string, prepare func(key string)) {
		t.Run(name, func(t *testing.T) {
			script := scripted{client, "tollgate"}
			c := stateCharge()
			key := (&redisStore{prefix: script.prefix}).key(c.ID)
			client.Del(ctx, key)
			prepare(key)
			before := client.PTTL(ctx, key).Val()
			script.take(t, stateEpoch, []Charge{c})
			if ttl := server.TTLs()[key]; ttl <= 0 || ttl > max(before, 3*time.Hour) {
				t.Errorf("after one request the key has a TTL of %s, before it had %s", ttl, before)
			}
			heals(t, script, stateEpoch, c)
		})
	}
	for name, fields := range hostileFields() {
		run(name, func(key string) {
			for i, field := range []string{"zapi", "p"} {
				if fields[i] != "" {
					client.HSet(ctx, key, field, fields[i])
				}
			}
		})
	}
	run("a string", func(key string) { client.Set(ctx, key, "x", 0) })
	run("a list", func(key string) { client.RPush(ctx, key, "x", "y") })
	run("a set that ends in a year", func(key string) { client.SAdd(ctx, key, "x"); client.Expire(ctx, key, 365*24*time.Hour) })
	run("a stream", func(key string) { client.XAdd(ctx, &redis.XAddArgs{Stream: key, Values: []string{"a", "b"}}) })
	run("a sorted set", func(key string) { client.ZAdd(ctx, key, redis.Z{Member: "x"}) })
	run("no TTL", func(key string) {
		scripted{client, "tollgate"}.take(t, stateEpoch, []Charge{stateCharge()})
		client.Persist(ctx, key)
	})
	run("other fields", func(key string) { client.HSet(ctx, key, "x", "y", "zother", "\x01", "pother", "\x01") })
}

// The same for bytes that nobody thought of. Answers DESIGN §6, gateways C-2 31 (never a wrap at run time).
func TestStoredStateIsRandom(t *testing.T) {
	server := redistest.Start(t)
	client := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer client.Close()
	ctx := context.Background()
	script := scripted{client, "tollgate"}
	key := (&redisStore{prefix: script.prefix}).key(ID{1})
	rapid.Check(t, func(t *rapid.T) {
		c := limited("api", 1, rapid.SampledFrom([]string{"1/h", "7/s", "30000/s", "10000000/day", "13/17s"}).Draw(t, "rate"), rapid.SampledFrom([]int64{1, 7, 1000}).Draw(t, "burst"))
		c.Penalty = &penaltyRules{after: rapid.Int64Range(0, 3).Draw(t, "after"), base: 1e6, max: 60e6, window: 60e6}
		field := func(name string, length int) string {
			if rapid.Bool().Draw(t, name+" of our form") { // else nothing would get past its version and length
				return "\x01" + string(rapid.SliceOfN(rapid.SampledFrom([]byte{0, 1, 0x06, 0x7f, 0x80, 0xff, 0x44}), length-1, length-1).Draw(t, name))
			}
			return string(rapid.SliceOfN(rapid.Byte(), 0, 40).Draw(t, name))
		}
		client.Del(ctx, key)
		client.HSet(ctx, key, "zapi", field("bucket", 23), "p", field("record", 17))
		heals(t, script, stateEpoch, c)
	})
}

// clientKeys returns the keys in a Redis but that of the probe.
func clientKeys(server *redistest.Server) []string {
	return slices.DeleteFunc(server.Keys(), func(key string) bool { return strings.Contains(key, ":{probe") })
}

// The same as clients see it: no 5xx, and well again as soon as the block that the configuration allows is over.
func TestStoredStateIsHostileToNodes(t *testing.T) {
	server := redistest.Start(t)
	n := node.Start(t, site("redis {$REDIS} {\n timeout 5s\n sensitive_timeout 5s\n}\nnodes 1\nkey_secret s",
		"penalty {\n base 1s\n max 2s\n window 1s\n}\nzone api {\n rate 100/s\n burst 10\n}"), node.Env("REDIS", server.Addr()))
	n.Get("/")
	keys := clientKeys(server)
	if len(keys) != 1 {
		t.Fatalf("keys %v", keys)
	}
	key := keys[0]
	forget := func() { // what the node knows of blocks, too
		t.Helper()
		if answer := n.Admin("POST", "/rate_limit/unblock", `{"zone":"api","key":"127.0.0.1"}`); answer.Status != 200 {
			t.Errorf("unblock: %+v", answer)
		}
		server.Do("del", key)
	}
	ask := func(what string) {
		t.Helper()
		answer := n.Get("/")
		if wait, _ := strconv.Atoi(answer.Header.Get("Retry-After")); answer.Status != 200 && answer.Status != 429 || wait > 2 {
			t.Errorf("%s: status %d, told to wait %d s", what, answer.Status, wait)
		}
		if ttl, there := server.TTLs()[key]; there && (ttl <= 0 || ttl > 15*time.Second) {
			t.Errorf("%s: TTL %s", what, ttl)
		}
	}
	for name, fields := range hostileFields() {
		forget()
		for i, field := range []string{"zapi", "p"} {
			if fields[i] != "" {
				server.Do("hset", key, field, fields[i])
			}
		}
		ask(name)
	}
	for _, command := range [][]any{{"set", key, "x"}, {"rpush", key, "x"}, {"sadd", key, "x"}} {
		forget()
		server.Do(command...)
		ask(fmt.Sprint(command[0]))
		if answer := n.Get("/"); answer.Header.Get("X-RateLimit-Remaining") == "" {
			t.Errorf("%s: %+v", command[0], answer)
		}
	}
	forget()
	server.Do("hset", key, "p", packedRecord(1, 65535, 1<<52, 1<<52))
	server.Do("set", "tollgate:blocks", "no list")
	if blocked := n.Get("/"); blocked.Header.Get("X-RateLimit-Reason") != "blocked" || blocked.Header.Get("Retry-After") != "2" {
		t.Errorf("a block until 2^52: %+v", blocked)
	}
	if answer := n.Admin("POST", "/rate_limit/unblock", `{"zone":"api","key":"127.0.0.1"}`); answer.Status != 200 {
		t.Errorf("unblock beside a broken list: %+v", answer)
	}
	if status := n.Get("/").Status; status != 200 {
		t.Errorf("unblocked: status %d", status)
	}
	for _, line := range n.Logs() {
		if line["level"] == "error" {
			t.Errorf("an ERROR line: %v", line)
		}
	}
}

// One entry of the list of blocks that is not ours does not hide the others. Answers DESIGN §6, shedding d 51 (no way to list).
func TestListOfBlocksIsHostile(t *testing.T) {
	server := redistest.Start(t)
	n := node.Start(t, site("redis {$REDIS} {\n timeout 5s\n sensitive_timeout 5s\n}\nnodes 1\nkey_secret s",
		"penalty {\n after 0\n}\nzone api {\n rate 1/h\n burst 1\n}"), node.Env("REDIS", server.Addr()))
	statuses(n, 2, "/")
	for score, entry := range map[string]string{"+inf": "x", "9e15": "garbage", "1e300": "AAAAAAAAAAAAAAAAAAAAAA  ", "8e15": "not-an-id group ", "7e15": "\xff\x00 \xff"} {
		server.Do("zadd", "tollgate:blocks", score, entry)
	}
	awaitBlocks(t, n, 1)
	answer := n.Admin("GET", "/rate_limit/blocks", "")
	server.Do("set", "tollgate:blocks", "no list")
	if again := n.Admin("GET", "/rate_limit/blocks", ""); again.Status != 200 || len(clientKeys(server)) != 1 {
		t.Errorf("a list that is none: status %d: %s, keys %v", again.Status, again.Body, server.Keys())
	}
	if answer.Status != 200 || strings.Count(answer.Body, `"id"`) != 1 {
		t.Errorf("status %d: %s", answer.Status, answer.Body)
	}
}
