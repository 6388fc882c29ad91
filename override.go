package ratelimit

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
)

// This file holds what an operator has said about zones whose store is down: it overrides sensitive and on_store_error, on this
// node, for an hour at most.

// maxOverride is the longest an override holds: it is for the time until somebody has thought about the configuration.
const maxOverride = time.Hour

// overrides holds them by zone. They live until they end, whatever configuration runs: a reload in an incident keeps them.
var overrides overrideTable

// overrideTable holds at most one override a zone. All methods may be called at the same time.
type overrideTable struct {
	held atomic.Int32 // how many there are, so that who decides without the store need not lock to see that there is none

	mu     sync.Mutex
	byZone map[string]*override
}

// override is what holds for a zone until a time.
type override struct {
	action string
	policy Policy
	until  int64 // µs by the clock of this process
	timer  *time.Timer
}

// overrideActions are the words for what an override does.
var overrideActions = map[string]Policy{"local": PolicyShare, "deny": PolicyDeny, "allow": PolicyAllow}

// apply lets the overrides that hold at a time decide what charges do while their store does not answer.
func (t *overrideTable) apply(now int64, charges []Charge) {
	if t.held.Load() == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range charges {
		if o := t.byZone[charges[i].Zone]; o != nil && o.until > now {
			charges[i].OnStoreError = o.policy
		}
	}
}

// set makes an override hold from now on, in place of one that is there.
func (t *overrideTable) set(now int64, zone, action string, length time.Duration) overrideInfo {
	o := &override{action: action, policy: overrideActions[action], until: now + length.Microseconds()}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.byZone == nil {
		t.byZone = map[string]*override{}
	}
	if old := t.byZone[zone]; old != nil {
		old.timer.Stop()
	} else {
		t.held.Add(1)
	}
	t.byZone[zone] = o
	o.timer = time.AfterFunc(length, func() { t.expire(zone, o) }) // owned by the entry: whoever removes it stops it
	return o.info(zone)
}

// expire ends an override whose time is over, unless somebody else did.
func (t *overrideTable) expire(zone string, o *override) {
	t.mu.Lock()
	ended := t.byZone[zone] == o
	if ended {
		t.removeLocked(zone)
	}
	t.mu.Unlock()
	if ended {
		runningLogger().Info("override ended", zap.String("zone", zone), zap.String("action", o.action), zap.String("why", "its time is over"))
	}
}

// end ends the override of a zone, and says what it was and whether it still held.
func (t *overrideTable) end(now int64, zone string) (overrideInfo, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	o := t.byZone[zone]
	if o == nil || o.until <= now {
		return overrideInfo{}, false
	}
	o.timer.Stop()
	t.removeLocked(zone)
	return o.info(zone), true
}

func (t *overrideTable) removeLocked(zone string) {
	delete(t.byZone, zone)
	t.held.Add(-1)
}

// shown lists the overrides that hold at a time, by zone.
func (t *overrideTable) shown(now int64) []overrideInfo {
	t.mu.Lock()
	defer t.mu.Unlock()
	list := []overrideInfo{}
	for zone, o := range t.byZone {
		if o.until > now {
			list = append(list, o.info(zone))
		}
	}
	slices.SortFunc(list, func(x, y overrideInfo) int { return cmp.Compare(x.Zone, y.Zone) })
	return list
}

func (o *override) info(zone string) overrideInfo {
	return overrideInfo{Zone: zone, Action: o.action, Until: wall(o.until)}
}

// overridesShown lists the overrides that hold now.
func overridesShown() []overrideInfo { return overrides.shown(processMicros()) }

// runningLogger returns the logger of the configuration that runs, for what outlives configurations.
func runningLogger() *zap.Logger {
	if app := running.Load(); app != nil {
		return app.logger
	}
	return caddy.Log().Named("rate_limit")
}
