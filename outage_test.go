package ratelimit

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// What clients notice of an outage after which Redis has everything that it had before.

// cutOff is a Redis that nodes come to through a proxy.
type cutOff struct {
	*redistest.Proxy
	redis *redistest.Server
	nodes []*node.Node
	times int
}

func newCutOff(t *testing.T, nodes int, global, block string) *cutOff {
	t.Helper()
	redis := redistest.Start(t)
	c := &cutOff{Proxy: redistest.NewProxy(t, redis.Addr()), redis: redis}
	caddyfile := site("redis {$REDIS} {\n timeout 1s\n sensitive_timeout 1s\n}\nkey_secret test\n"+global, block)
	for range nodes {
		c.nodes = append(c.nodes, node.Start(t, caddyfile, node.Env("REDIS", c.Addr())))
	}
	for _, n := range c.nodes {
		c.await(t, n, "redis is up", 1)
	}
	return c
}

func (*cutOff) await(t *testing.T, n *node.Node, line string, times int) {
	t.Helper()
	proc.Eventually(t, "a node logs "+line, func() bool { return n.LogLines(`"`+line) == times })
}

// during runs something while the nodes cannot reach Redis and know it. A client called other finds that out for them.
func (c *cutOff) during(t *testing.T, what func()) {
	t.Helper()
	c.Refuse(true)
	c.Cut()
	for _, n := range c.nodes {
		for n.LogLines("redis is down") == c.times {
			n.Get("/other", "X-Client: other")
		}
	}
	c.times++
	what()
	c.Refuse(false)
	for _, n := range c.nodes {
		c.await(t, n, "redis is up again", c.times)
	}
}

// answers gets a path at a node so often as a client and counts by what was said: "200", or "429" and the reason.
func (c *cutOff) answers(n, times int, client string) map[string]int {
	got := map[string]int{}
	for range times {
		a := c.nodes[n].Get("/", "X-Client: "+client)
		got[strconv.Itoa(a.Status)+a.Header.Get("X-RateLimit-Reason")]++
	}
	return got
}

func (c *cutOff) want(t *testing.T, why string, got map[string]int, status string, n int) {
	t.Helper()
	if got[status] != n {
		t.Errorf("%s: %v, want %d of %s", why, got, n, status)
	}
}

const clientZone = "zone api {\n key {header.X-Client}\n rate 1/h\n burst %s\n%s\n}\nzone other {\n match path /other\n rate 1000/s\n}\npenalty {\n after 3\n base 30m\n}"

// Across an outage a client gets at most its limit and the shares of the nodes. What the shares refuse is no strike; who was
// blocked before is blocked all the time.
func TestAcrossAnOutage(t *testing.T) {
	c := newCutOff(t, 2, "nodes 2", fmt.Sprintf(clientZone, "20", ""))
	c.want(t, "somebody runs into the limit", c.answers(0, 24, "bad"), "429blocked", 1)
	c.want(t, "before", c.answers(0, 5, "good"), "200", 5)
	retry := c.nodes[0].Get("/", "X-Client: bad").Header.Get("Retry-After")
	c.want(t, "the other node learns of the block", c.answers(1, 1, "bad"), "429blocked", 1)

	c.during(t, func() {
		for n := range c.nodes {
			got := c.answers(n, 100, "good")
			c.want(t, "a share", got, "200", 10)
			c.want(t, "a share refuses, it does not block", got, "429limited", 90)
			c.want(t, "who is blocked", c.answers(n, 20, "bad"), "429blocked", 20)
			if got := c.nodes[n].Get("/", "X-Client: bad").Header.Get("Retry-After"); seconds(t, got) > seconds(t, retry) || seconds(t, got) < seconds(t, retry)-30 {
				t.Errorf("during the outage the block lasts %s s, before it %s s", got, retry)
			}
		}
	})

	c.want(t, "what was left before", c.answers(1, 15, "good"), "200", 15)
	c.want(t, "the first refusals by Redis", c.answers(0, 3, "good"), "429limited", 3)
	c.want(t, "one more, and there were four strikes", c.answers(1, 1, "good"), "429blocked", 1)
	c.want(t, "who was blocked before", c.answers(1, 20, "bad"), "429blocked", 20)
	checkKeys(t, c.redis, 24*time.Hour, "good", "bad")
}

// A client that stays on its connection to one of forty nodes gets a fortieth while Redis is away, and is not punished for what
// it asked for beyond. With the whole limit on each node it notices nothing.
func TestPinnedToOneOfFortyNodes(t *testing.T) {
	c := newCutOff(t, 1, "nodes 40", fmt.Sprintf(clientZone, "100", ""))
	c.during(t, func() {
		got := c.answers(0, 50, "pinned")
		c.want(t, "a fortieth of 100", got, "200", 2)
		c.want(t, "no block by a share", got, "429limited", 48)
	})
	c.want(t, "afterwards", c.answers(0, 100, "pinned"), "200", 100)
	c.want(t, "no strike was kept", c.answers(0, 3, "pinned"), "429limited", 3)

	c = newCutOff(t, 1, "nodes 40", fmt.Sprintf(clientZone, "100", "on_store_error local full"))
	c.want(t, "before", c.answers(0, 30, "pinned"), "200", 30)
	c.during(t, func() { c.want(t, "the whole limit", c.answers(0, 50, "pinned"), "200", 50) })
	c.want(t, "afterwards", c.answers(0, 20, "pinned"), "200", 20)
}

func seconds(t *testing.T, text string) int {
	t.Helper()
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
