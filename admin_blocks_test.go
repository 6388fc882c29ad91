package ratelimit

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// pages reads a list of blocks to its end, so many at a time, and returns who is in it, in its order.
func pages(t *testing.T, most int, read func(after blockPlace, most int) []knownBlock) (all []string) {
	t.Helper()
	var after blockPlace
	for {
		found := read(after, most+1)
		if len(found) > most+1 {
			t.Fatalf("%d blocks where %d were asked for", len(found), most+1)
		}
		for i := range found[:min(len(found), most)] {
			all = append(all, found[i].place().String())
		}
		if len(found) <= most {
			return all
		}
		place, err := parseBlockPlace(found[most-1].place().String())
		if err != nil {
			t.Fatal(err)
		}
		after = place
	}
}

// manyBlocks returns blocks of which many end at the same time.
func manyBlocks(count int, from int64) []knownBlock {
	list := make([]knownBlock, count)
	for i := range list {
		var id ID
		binary.BigEndian.PutUint64(id[:], uint64(i)*0x9e3779b97f4a7c15)
		list[i] = knownBlock{id: id, group: []string{"", "a", "a.b"}[i%3], until: from + int64(i/100)*1000}
	}
	return list
}

// A long list is read a page at a time, in one order, and nobody is missed or seen twice, though many blocks end together.
func TestBlocksAreListedInPages(t *testing.T) {
	now := time.Now().UnixMicro()
	blocks := manyBlocks(5000, now+time.Hour.Microseconds())
	want := make([]string, len(blocks))
	slices.SortFunc(blocks, func(x, y knownBlock) int { return x.place().compare(y.place()) })
	for i := range blocks {
		want[i] = blocks[i].place().String()
	}
	read := map[string]func(after blockPlace, most int) []knownBlock{}

	m := newMemoryStore()
	for i, b := range blocks {
		p := &penaltyRules{group: b.group, after: 3, base: 60e6, max: 3600e6, window: int64(i%7) * 1e6} // which is another order in memory
		m.change(now, b.id, p, 20_000, func(int64, strikeRecord) strikeRecord { return strikeRecord{strikes: 4, until: b.until, last: now} })
	}
	for i := range 3000 { // and some who are not blocked
		m.change(now, ID{1, byte(i), byte(i >> 8)}, defaultRules(), 20_000, func(int64, strikeRecord) strikeRecord { return strikeRecord{strikes: 1, last: now} })
	}
	read["memory"] = func(after blockPlace, most int) []knownBlock { return m.blocksAfter(now, after, most) }

	s := alone(t, longBudgets)
	for part := range slices.Chunk(blocks, 500) {
		command := []any{"zadd", s.store.listKey()}
		for i := range part {
			command = append(command, strconv.FormatInt(part[i].until/1000, 10), member(part[i]))
		}
		s.server.Do(command...)
	}
	s.server.Do("zadd", s.store.listKey(), now/1000-1, member(knownBlock{id: ID{9}}), now/1000+3600_000, "garbage")
	s.awaitRedis()
	read["redis"] = func(after blockPlace, most int) []knownBlock {
		list, err := s.store.blocksAfter(context.Background(), after, most)
		if err != nil {
			t.Fatal(err)
		}
		return list
	}
	for store, read := range read {
		for _, most := range []int{7, 1000, 4999, 5000, 10_000} {
			if got := pages(t, most, read); !slices.Equal(got, want) {
				t.Errorf("%s, %d at a time: %d blocks, want %d", store, most, len(got), len(want))
			}
		}
	}
}

// One Redis that is down is named, and what this node remembers of its blocks is listed; those of the others are listed all the
// same. Pages work over the admin endpoint.
func TestBlocksWithoutOneRedis(t *testing.T) {
	first, second := redistest.Start(t), redistest.Start(t)
	block := func(path, zone, server string) string {
		return fmt.Sprintf("handle %s {\n rate_limit {\n redis {$%s} {\n timeout 1s\n sensitive_timeout 1s\n}\n nodes 1\n penalty {\n after 0\n}\n zone %s {\n key {header.X-Client}\n rate 1/h\n burst 1\n}\n}\n respond ok\n}\n", path, server, zone)
	}
	n := node.Start(t, "{\n admin {$ADMIN}\n}\nhttp://:{$PORT} {\n"+block("/a", "a", "FIRST")+block("/b", "b", "SECOND")+"}\n",
		node.Env("FIRST", first.Addr()), node.Env("SECOND", second.Addr()))
	proc.Eventually(t, "both are up", func() bool { return n.LogLines("redis is up") == 2 })
	for i := range 3 {
		statuses(n, 2, "/a", fmt.Sprint("X-Client: a", i))
		statuses(n, 2, "/b", fmt.Sprint("X-Client: b", i))
	}
	all := awaitBlocks(t, n, 6)
	var paged []blockInfo
	for path := "blocks?limit=4"; path != ""; {
		page := asked[blocksInfo](t, n, path, "")
		paged = append(paged, page.Blocks...)
		if path = ""; page.More {
			path = "blocks?limit=4&after=" + url.QueryEscape(page.Next)
		}
	}
	if !slices.Equal(paged, all) {
		t.Errorf("in pages\n%+v, at once\n%+v", paged, all)
	}
	second.Kill()
	list := asked[blocksInfo](t, n, "blocks", "")
	stores := map[string]int{}
	for _, b := range list.Blocks {
		stores[b.Store]++
	}
	if len(list.Errors) != 1 || !strings.Contains(list.Errors[0], second.Addr()) {
		t.Errorf("errors: %q", list.Errors)
	}
	if stores["redis"] != 3 || stores["share"] != 3 || list.More {
		t.Errorf("blocks by store: %v, %+v", stores, list)
	}
}

// One refusal can block two identities: both are listed, with the key of each, and nobody who is not blocked.
func TestEveryBlockOfARefusalIsListed(t *testing.T) {
	redis := redistest.Start(t)
	n := node.Start(t, site(patientRedis+"nodes 1", "penalty {\n after 0\n}\nlog_key on\nzone address {\n key {header.X-Address}\n rate 1/h\n burst 1\n}\nzone user {\n key {header.X-User}\n rate 1/h\n burst 1\n}\nzone all {\n key {header.X-Site}\n rate 1/h\n burst 100\n}"), node.Env("REDIS", redis.Addr()))
	statuses(n, 2, "/", "X-Address: home", "X-User: alice", "X-Site: shop")
	keys := []string{}
	for _, b := range awaitBlocks(t, n, 2) {
		keys = append(keys, b.Key)
		if until := time.Until(b.Until); until < time.Minute || until > 2*time.Minute {
			t.Errorf("%s is blocked for %s", b.Key, until)
		}
	}
	if slices.Sort(keys); !slices.Equal(keys, []string{"alice", "home"}) {
		t.Errorf("listed: %q", keys)
	}
	statuses(n, 1, "/", "X-Address: home", "X-User: alice", "X-Site: shop")
	statuses(n, 2, "/", "X-Address: away", "X-User: bob", "X-Site: shop")
	awaitBlocks(t, n, 4)
}
