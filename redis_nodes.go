package ratelimit

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"fmt"
	"math"
	mathrand "math/rand/v2"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"go.uber.org/zap"
)

// This file counts the processes that share the limits in one Redis under one prefix. Each announces itself there every few
// seconds; the number is for the day when Redis does not answer, so it errs to the high side, where shares are small.

const (
	// nodesBeat is how often a process announces itself, on average; nodesLife is how long an announcement holds. That is three
	// beats: a lost one makes nobody disappear.
	nodesBeat, nodesLife = 3 * time.Second, 10 * time.Second
	// nodesFarewell bounds how long the end of the last configuration waits until the process has left.
	nodesFarewell = 250 * time.Millisecond
)

// processID names this process among all nodes, for as long as it lives.
var processID = rand.Text()[:16]

// census is one process' part in counting, and what it believes. It belongs to a client, so that reloads keep it; its one
// goroutine belongs to the wire.
type census struct {
	id         string
	version    string
	beat, life time.Duration
	// limits returns what the configuration that runs now has to announce, and whether it wants to be counted at all. It is asked
	// every time: configurations come and go, and one that was started may yet be rejected.
	limits func(*redisClient) (hash string, counted bool)
	// asks makes the goroutine announce, or leave, now. A channel that comes along is closed when that is done.
	asks chan chan struct{}

	// believed is how many nodes there are; 0 until Redis has told.
	believed atomic.Int64
	lower    lowerCount
}

func newCensus() *census {
	return &census{id: processID, version: moduleVersion(), beat: nodesBeat, life: nodesLife, limits: limitsInForce, asks: make(chan chan struct{}, 1)}
}

// lowerCount watches numbers that are lower than what is believed.
type lowerCount struct {
	since   time.Time // of the first in a row; zero if there is none
	highest int64     // of the row
}

// hear takes a number from Redis. A higher one is believed at once. A lower one must hold for as long as an announcement: after
// a failover or FLUSHALL the set fills again within that time.
func (c *census) hear(now time.Time, count int64) {
	count = min(count, math.MaxInt32)
	if count >= c.believed.Load() {
		c.believed.Store(count)
		c.lower = lowerCount{}
		return
	}
	if c.lower.since.IsZero() {
		c.lower.since = now
	}
	c.lower.highest = max(c.lower.highest, count)
	if now.Sub(c.lower.since) >= c.life {
		c.believed.Store(c.lower.highest)
		c.lower = lowerCount{}
	}
}

// silence notes that Redis did not tell: what is believed stays, and nothing lower has held meanwhile.
func (c *census) silence() { c.lower = lowerCount{} }

// nodes returns the number to divide a limit by: what is believed, at least so many.
func (c *census) nodes(least int64) int64 { return max(c.believed.Load(), least) }

// ask makes the goroutine announce soon, if there is one.
func (c *census) ask() {
	select {
	case c.asks <- nil:
	default: // it will, as it was asked before
	}
}

// farewell asks the goroutine to leave and waits for it until the context ends.
func (c *census) farewell(ctx context.Context) {
	left := make(chan struct{})
	select {
	case c.asks <- left:
	case <-ctx.Done():
		return
	}
	select {
	case <-left:
	case <-ctx.Done():
	}
}

// announce starts to count the nodes, or announces a changed configuration at once. Only App.Start calls it: a configuration
// that is merely validated announces nothing.
func (c *redisClient) announce() {
	w := c.enter()
	defer c.leave(1)
	c.mu.Lock()
	first := !w.announces
	w.announces = true
	c.mu.Unlock()
	if first {
		go c.announcements(w)
	} else {
		c.census.ask()
	}
}

// announcements runs until the wire is cut.
func (c *redisClient) announcements(w *wire) {
	a := announcer{client: c, census: c.census, wire: w}
	var asked chan struct{}
	for {
		a.now()
		if asked != nil {
			close(asked)
			asked = nil
		}
		select {
		case <-w.ctx.Done():
			return
		case <-time.After(a.pause()):
		case asked = <-a.census.asks:
		}
	}
}

// announcer is what the goroutine remembers.
type announcer struct {
	client *redisClient
	census *census
	wire   *wire
	// told is what Redis has confirmed, sent what may have reached it besides; empty for nothing.
	told, sent string
	complained bool
}

func (a *announcer) pause() time.Duration {
	beat := a.census.beat
	return beat/2 + mathrand.N(beat) //nolint:gosec // no secret
}

// now does what the running configuration wants.
func (a *announcer) now() {
	hash, counted := a.census.limits(a.client)
	switch {
	case counted:
		a.announce(nodeInfo{ID: a.census.id, Version: a.census.version, Limits: hash}.member())
	case a.told != "" || a.sent != "":
		a.leave()
	}
}

//go:embed nodes.lua
var nodesScript string

var nodesCommand = redis.NewScript(nodesScript)

func (a *announcer) announce(member string) {
	ctx, cancel := context.WithTimeout(a.wire.ctx, dialTimeout+a.client.settings.patience)
	defer cancel()
	args := []any{member, a.census.life.Milliseconds()}
	for _, before := range []string{a.told, a.sent} {
		if before != "" && before != member {
			args = append(args, before)
		}
	}
	a.sent = member
	count, err := nodesCommand.Run(ctx, a.wire.any(), []string{a.client.settings.nodesKey()}, args...).Int64()
	if err != nil {
		a.census.silence()
		a.complain(err)
		return
	}
	a.told, a.sent, a.complained = member, "", false
	a.census.hear(time.Now(), count)
}

// leave takes the process off the list. If that fails, the announcement ends by itself.
func (a *announcer) leave() {
	ctx, cancel := context.WithTimeout(a.wire.ctx, nodesFarewell)
	defer cancel()
	a.wire.any().ZRem(ctx, a.client.settings.nodesKey(), a.told, a.sent)
	a.told, a.sent = "", ""
}

// complain logs once that the nodes cannot be counted though Redis answers; what everybody is refused with is in the log already.
func (a *announcer) complain(err error) {
	if a.complained || classify(err) != classMistake {
		return
	}
	a.complained = true
	a.client.log().Error("nodes cannot be counted, the last number holds", zap.Stringer("redis", &a.client.settings), zap.Error(err))
}

// nodesKey is where the nodes of a prefix announce themselves.
func (s *redisSettings) nodesKey() string { return s.prefix + ":nodes" }

// sameNodes says whether two clients announce in the same place.
func (s *redisSettings) sameNodes(other *redisSettings) bool {
	return s.kind == other.kind && s.network == other.network && s.addresses == other.addresses && s.master == other.master &&
		s.db == other.db && s.prefix == other.prefix
}

// nodeInfo is a process that announced itself, as the admin endpoint shows it.
type nodeInfo struct {
	// ID names the process while it lives. It is random.
	ID string `json:"id"`
	// Version is that of this module.
	Version string `json:"version"`
	// Limits is a hash of the limits that the process enforces: equal limits, equal hash.
	Limits string `json:"limits"`
	// Until is when it is gone unless it announces itself again, by the clock of Redis.
	Until time.Time `json:"until"`
	// Self marks the process that answers.
	Self bool `json:"self,omitempty"`
}

// member is what stands in the list.
func (n nodeInfo) member() string { return n.ID + " " + n.Version + " " + n.Limits }

func parseNode(member string, until float64) (nodeInfo, bool) {
	parts := strings.Split(member, " ")
	if len(parts) != 3 {
		return nodeInfo{}, false
	}
	return nodeInfo{ID: parts[0], Version: parts[1], Limits: parts[2], Until: wall(int64(until) * 1000), Self: parts[0] == processID}, true
}

// nodes lists who shares the limits now. What is in the list and none of ours is left out.
func (s *redisStore) nodes(ctx context.Context) ([]nodeInfo, error) {
	w := s.client.enter()
	defer s.client.leave(1)
	now, err := w.any().Time(ctx).Result()
	if err != nil {
		return nil, fmt.Errorf("asking Redis for the nodes: %w", err)
	}
	found, err := w.any().ZRangeByScoreWithScores(ctx, s.client.settings.nodesKey(), &redis.ZRangeBy{
		Min: "(" + strconv.FormatInt(now.UnixMilli(), 10),
		Max: strconv.FormatInt(now.Add(s.client.census.life).UnixMilli(), 10),
	}).Result()
	if err != nil {
		return nil, fmt.Errorf("asking Redis for the nodes: %w", err)
	}
	list := make([]nodeInfo, 0, len(found))
	for _, z := range found {
		if n, ok := parseNode(fmt.Sprint(z.Member), z.Score); ok {
			list = append(list, n)
		}
	}
	return list, nil
}

// limitsInForce says what the configuration that runs announces by a client: anything if a client of its own announces in the
// same place, so that a change of the timeout does not take the process off the list.
func limitsInForce(c *redisClient) (hash string, counted bool) {
	app := running.Load()
	if app == nil {
		return "", false
	}
	for _, s := range app.remotes {
		if s.counted && s.client.settings.sameNodes(&c.settings) {
			return app.limits, true
		}
	}
	return "", false
}

// limitsHash is a hash of all limits of a configuration: the same on all nodes that have the same.
func (a *App) limitsHash() string {
	h := sha256.New()
	for _, name := range sortedNames(a.zones) {
		z := a.zones[name]
		fmt.Fprintf(h, "%q %d/%d %d %q %d %d %q %d", name, z.Rate.num, z.Rate.den, z.burst(), z.fullKey(),
			orDefault(z.IPv4Prefix, 32), orDefault(z.IPv6Prefix, 64), z.Store, z.charge.OnStoreError)
		for _, c := range z.Costs {
			fmt.Fprintf(h, " cost %d", c.Tokens)
		}
		fmt.Fprintln(h)
	}
	for _, name := range sortedNames(a.penalties) {
		r := &a.penalties[name].rules
		fmt.Fprintf(h, "penalty %q %d %d %d %d %d\n", r.group, r.after, r.base, r.max, r.window, r.every)
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
}

// moduleVersion is the version of this module in the program that runs, which is usually another module.
func moduleVersion() string {
	const path = "github.com/caddy-tollgate/ratelimit"
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "devel"
	}
	for _, m := range append([]*debug.Module{&info.Main}, info.Deps...) {
		if m.Path == path && m.Version != "" && m.Version != "(devel)" {
			return m.Version
		}
	}
	return "devel"
}
