package ratelimit

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/proc"
)

// overridden makes an override hold until the test ends.
func overridden(t *testing.T, now int64, zone, action string) {
	t.Helper()
	overrides.set(now, zone, action, time.Hour)
	t.Cleanup(func() { overrides.end(now, zone) })
}

// An override decides in place of sensitive and on_store_error while the store is down, for the zone that it names, until it ends.
func TestOverrideDecidesWithoutTheStore(t *testing.T) {
	for _, test := range []struct {
		policy Policy
		action string
		want   int // of 100 requests at a burst of 40, by one of four nodes
	}{
		{PolicyDeny, "local", 10},
		{PolicyDeny, "allow", 100},
		{PolicyShare, "deny", 0},
		{PolicyShare, "allow", 100},
		{PolicyFull, "local", 10},
		{PolicyAllow, "deny", 0},
	} {
		t.Run(fmt.Sprint(test.policy, " ", test.action), func(t *testing.T) {
			l, now := newTestLimiter(&scriptedStore{err: errDown}, 4)
			charge := func(zone string) Charge {
				c := testCharge(zone, 40)
				c.OnStoreError = test.policy
				return c
			}
			plain := admitted(l, 100, charge("other"))
			overridden(t, *now, "overridden", test.action)
			if n := admitted(l, 100, charge("overridden")); n != test.want {
				t.Errorf("%d admitted, want %d", n, test.want)
			}
			l.shares.reset(ID{1}, "other")
			if n := admitted(l, 100, charge("other")); n != plain {
				t.Errorf("%d admitted in another zone, without the override %d", n, plain)
			}
			*now += time.Hour.Microseconds()
			l.shares.reset(ID{1}, "overridden")
			if n := admitted(l, 100, charge("overridden")); n != plain {
				t.Errorf("%d admitted when its time is over, without it %d", n, plain)
			}
		})
	}
}

// While the store answers, an override changes nothing; a block that is known holds whatever it says.
func TestOverrideIsForOutages(t *testing.T) {
	remote := &scriptedStore{decision: Decision{Reason: ReasonLimited, Zone: "login", RetryAfter: time.Second, tokens: []int64{0}}}
	l, now := newTestLimiter(remote, 1)
	overridden(t, *now, "login", "allow")
	c := testCharge("login", 40)
	c.OnStoreError, c.Penalty = PolicyDeny, defaultRules()
	if d := l.Decide(context.Background(), []Charge{c}); d.Allowed {
		t.Error("a refusal by the store is overridden")
	}
	remote.decision = Decision{Reason: ReasonBlocked, Zone: "login", RetryAfter: time.Hour, BlockStarted: true, Source: SourceRedis}
	l.Decide(context.Background(), []Charge{c})
	remote.err = errDown
	if d := l.Decide(context.Background(), []Charge{c}); d.Reason != ReasonBlocked {
		t.Errorf("a known block is overridden: %+v", d)
	}
}

// An override ends once: by its time, by an operator, or by the next one; each end is seen in the list.
func TestOverrideEnds(t *testing.T) {
	var table overrideTable
	table.set(0, "a", "allow", time.Hour)
	table.set(0, "b", "deny", time.Millisecond)
	proc.Eventually(t, "the time of one is over", func() bool { return table.held.Load() == 1 })
	table.set(0, "a", "local", time.Hour)
	if list := table.shown(0); len(list) != 1 || list[0].Action != "local" || table.held.Load() != 1 {
		t.Errorf("replaced: %+v, %d held", list, table.held.Load())
	}
	if list := table.shown(time.Hour.Microseconds()); len(list) != 0 {
		t.Errorf("an hour later: %+v", list)
	}
	if _, held := table.end(0, "b"); held {
		t.Error("one that is over is ended")
	}
	if info, held := table.end(0, "a"); !held || info.Zone != "a" || table.held.Load() != 0 {
		t.Errorf("ended: %+v, %d held", info, table.held.Load())
	}
}

// Redis is gone and login must open now: it does, is seen, survives a reload, and closes again when the operator says so or by
// itself.
func TestLoginIsOpenedInAnOutage(t *testing.T) {
	c := newCutOff(t, 1, "nodes 2", fmt.Sprintf(clientZone, "20", "sensitive"))
	n := c.nodes[0]
	set := func(action, length string) overrideInfo {
		return asked[overrideInfo](t, n, "override", fmt.Sprintf(`{"zone":"api","action":%q,"for":%q}`, action, length))
	}
	override := func() string {
		t.Helper()
		for _, z := range asked[zonesInfo](t, n, "zones", "").Zones {
			if z.Zone == "api" {
				return z.OnStoreError + " " + z.Override
			}
		}
		return "no zone"
	}
	c.during(t, func() {
		c.want(t, "closed", c.answers(0, 5, "alice"), "503unavailable", 5)
		set("allow", "10m")
		c.want(t, "allowed", c.answers(0, 50, "alice"), "200", 50)
		if info := set("local", "1h"); info.Action != "local" || time.Until(info.Until).Round(time.Minute) != time.Hour {
			t.Errorf("%+v", info)
		}
		c.want(t, "counted by the share", c.answers(0, 50, "alice"), "200", 10)
		if err := n.Load(site("redis {$REDIS} {\n timeout 1s\n sensitive_timeout 1s\n}\nkey_secret test\nnodes 2", fmt.Sprintf(clientZone, "20", "sensitive")+"\nlog_key on")); err != nil {
			t.Fatal(err)
		}
		if list := asked[overridesInfo](t, n, "override", "").Overrides; len(list) != 1 || list[0].Zone != "api" || override() != "sensitive local" {
			t.Errorf("after a reload: %+v, %s", list, override())
		}
		c.want(t, "counted by the share after a reload", c.answers(0, 50, "bob"), "200", 10)
		if answer := n.Admin("DELETE", "/rate_limit/override?zone=api", ""); answer.Status != 200 {
			t.Errorf("%+v", answer)
		}
		c.want(t, "closed again", c.answers(0, 5, "alice"), "503unavailable", 5)
		set("allow", "50ms")
		c.await(t, n, "override ended", 2)
		c.want(t, "closed by itself", c.answers(0, 5, "alice"), "503unavailable", 5)
		if override() != "sensitive " {
			t.Errorf("it is over and shown: %s", override())
		}
	})
	if lines := n.LogLines(`"override set"`); lines != 3 {
		t.Errorf("%d lines for three overrides", lines)
	}
}
