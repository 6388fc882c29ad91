package ratelimit

import (
	"cmp"
	heaps "container/heap"
	"fmt"
	"hash/maphash"
	"math"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
)

// This file says who asks for most. It watches a bounded number of clients: one that is not watched yet takes the place of the one
// that has asked for least, and with it what that one had asked for, which is by how much it may be overestimated. Whoever asked
// for more than all did together, divided by the places, is certainly among them (Space-Saving; Metwally, Agrawal and El Abbadi).
// What is long ago does not matter in an incident, so there are two such counts: of this stretch of time, and of the one before.

const (
	defaultTop, maxTop = 100, 10_000
	// topShards keep requests apart that come at the same time.
	topShards = 16
	// topPlaces is how many clients are watched for each that can be listed: the more, the smaller the error.
	topPlaces = 4
	// topStretch is how long is counted together, in microseconds.
	topStretch = 10 * 60 * 1_000_000
)

// topSketches holds the sketch of each size, for as long as a configuration wants one of that size.
var topSketches = caddy.NewUsagePool()

// topSketch counts what clients ask for. All methods may be called at the same time.
type topSketch struct {
	seed   maphash.Seed
	shards [topShards]topShard
}

// newTopSketch returns a sketch of which so many clients can be listed.
func newTopSketch(now int64, clients int) *topSketch {
	s := &topSketch{seed: maphash.MakeSeed()}
	for i := range s.shards {
		shard := &s.shards[i]
		shard.places = max(clients*topPlaces/topShards, topPlaces)
		shard.current, shard.before = newTopCount(now), newTopCount(now)
	}
	return s
}

// Destruct implements caddy.Destructor.
func (*topSketch) Destruct() error { return nil }

// topShard counts some of the clients; each is in one shard only.
type topShard struct {
	mu              sync.Mutex
	places          int // of each count
	current, before *topCount
	_               [64]byte // keeps the next one's lock out of this cache line
}

// topCount holds what was asked for since a time.
type topCount struct {
	since   int64 // µs by the clock of this process
	clients map[topKey]*topEntry
	least   topHeap
}

func newTopCount(since int64) *topCount {
	return &topCount{since: since, clients: map[topKey]*topEntry{}}
}

type topKey struct {
	zone string
	id   ID
}

// topEntry is a client that is watched.
type topEntry struct {
	topKey
	tokens, error int64 // millionths
	refused       uint64
	plain         string // its key in the clear, if that may be kept
	at            int    // in the heap
}

// topHeap holds entries; the first is one of the fewest tokens.
type topHeap []*topEntry

func (h topHeap) Len() int           { return len(h) }
func (h topHeap) Less(i, j int) bool { return h[i].tokens < h[j].tokens }
func (h topHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i]; h[i].at, h[j].at = i, j }

// Push implements heap.Interface of container/heap.
func (h *topHeap) Push(x any) {
	e := x.(*topEntry)
	e.at = len(*h)
	*h = append(*h, e)
}

// Pop implements heap.Interface of container/heap. Nobody is ever taken out, only replaced.
func (h *topHeap) Pop() any { return nil }

// note counts what a charge asks for, and whether it was refused. It says whether its client was not watched before: then its key
// in the clear can be told.
func (s *topSketch) note(now int64, c *Charge, refused bool) (fresh bool) {
	shard := s.shardOf(c)
	shard.mu.Lock()
	defer shard.mu.Unlock()
	shard.turn(now)
	e, fresh := shard.current.entry(topKey{c.Zone, c.ID}, shard.places)
	e.tokens += min(c.Cost, math.MaxInt64-e.tokens)
	if refused {
		e.refused++
	}
	heaps.Fix(&shard.current.least, e.at)
	return fresh
}

// tell notes the key of a client in the clear, if it is still watched.
func (s *topSketch) tell(c *Charge, plain string) {
	shard := s.shardOf(c)
	shard.mu.Lock()
	defer shard.mu.Unlock()
	if e := shard.current.clients[topKey{c.Zone, c.ID}]; e != nil {
		e.plain = plain
	}
}

func (s *topSketch) shardOf(c *Charge) *topShard {
	return &s.shards[(maphash.Bytes(s.seed, c.ID[:])^maphash.String(s.seed, c.Zone))%topShards]
}

// turn begins another count when it is time.
func (s *topShard) turn(now int64) {
	switch age := now - s.current.since; {
	case age >= 2*topStretch:
		s.before, s.current = newTopCount(now), newTopCount(now)
	case age >= topStretch:
		s.before, s.current = s.current, newTopCount(now)
	}
}

// entry returns the entry of a client, which may have to take the place of another's.
func (n *topCount) entry(key topKey, places int) (e *topEntry, fresh bool) {
	if e = n.clients[key]; e != nil {
		return e, false
	}
	if len(n.least) < places {
		e = &topEntry{topKey: key}
		heaps.Push(&n.least, e)
	} else {
		e = n.least[0]
		delete(n.clients, e.topKey)
		*e = topEntry{topKey: key, tokens: e.tokens, error: e.tokens, at: e.at}
	}
	n.clients[key] = e
	return e, true
}

// unseen is how much a client that is not watched may have asked for.
func (n *topCount) unseen(places int) int64 {
	if len(n.least) < places {
		return 0
	}
	return n.least[0].tokens
}

// list returns the clients that have asked for most, and since when that is counted.
func (s *topSketch) list(now int64, limit int) (most []topEntry, since int64) {
	since = now
	for i := range s.shards {
		shard := &s.shards[i]
		shard.mu.Lock()
		shard.turn(now)
		since = min(since, shard.before.since, shard.current.since)
		most = shard.appendTo(most)
		shard.mu.Unlock()
	}
	slices.SortFunc(most, func(a, b topEntry) int {
		return cmp.Or(cmp.Compare(b.tokens, a.tokens), cmp.Compare(a.zone, b.zone), slices.Compare(a.id[:], b.id[:]))
	})
	return most[:min(len(most), limit)], since
}

// appendTo adds up what both counts know of each client.
func (s *topShard) appendTo(list []topEntry) []topEntry {
	unseenNow, unseenBefore := s.current.unseen(s.places), s.before.unseen(s.places)
	for key, e := range s.current.clients {
		sum := *e
		if b := s.before.clients[key]; b != nil {
			sum.tokens, sum.error, sum.refused = sum.tokens+b.tokens, sum.error+b.error, sum.refused+b.refused
			sum.plain = cmp.Or(sum.plain, b.plain)
		} else {
			sum.tokens, sum.error = sum.tokens+unseenBefore, sum.error+unseenBefore
		}
		list = append(list, sum)
	}
	for key, b := range s.before.clients {
		if s.current.clients[key] == nil {
			sum := *b
			sum.tokens, sum.error = sum.tokens+unseenNow, sum.error+unseenNow
			list = append(list, sum)
		}
	}
	return list
}

// holdTop finds the sketch that the configuration wants. Cleanup gives it back; one of the same size outlives a reload.
func (a *App) holdTop() error {
	if a.Top == 0 {
		return nil
	}
	if a.Top > maxTop {
		return fmt.Errorf("top: must be from 1 to %d, got %d", maxTop, a.Top)
	}
	v, _, err := topSketches.LoadOrNew(a.Top, func() (caddy.Destructor, error) {
		return newTopSketch(processMicros(), int(a.Top)), nil
	})
	if err != nil {
		return err
	}
	a.topClients = v.(*topSketch)
	return nil
}

// countTop counts what the charges of a request asked for, if the configuration wants to know who asks for most.
func (h *Handler) countTop(r *http.Request, charges []Charge, d *Decision) {
	top := h.app.topClients
	if top == nil {
		return
	}
	now := h.limiter.now()
	for i := range charges {
		c := &charges[i]
		fresh := top.note(now, c, !d.Allowed && c.Zone == d.Zone)
		if fresh && h.LogKey {
			top.tell(c, h.plainKey(c.Zone, r))
		}
	}
}

// top returns the clients that ask for most, and since when that is counted.
func (a *App) top(limit int) (most []topClient, since time.Time) {
	list, at := a.topClients.list(processMicros(), limit)
	most = make([]topClient, 0, len(list))
	for _, e := range list {
		c := topClient{
			Zone: e.zone, ID: e.id.String(), Tokens: float64(e.tokens) / Token, Error: float64(e.error) / Token, Refused: e.refused,
		}
		if a.showsKeys(e.zone) {
			c.Key = e.plain
		}
		most = append(most, c)
	}
	return most, wall(at)
}

// showsKeys says whether keys of a zone may be shown in the clear.
func (a *App) showsKeys(zone string) bool {
	return slices.ContainsFunc(a.handlers, func(h *Handler) bool { return h.LogKey && h.zone(zone) != nil })
}
