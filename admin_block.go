package ratelimit

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
)

// This file blocks a client by hand, and lets one go: in Redis and on this node at once, on other nodes as soon as they ask Redis,
// which for a block that they know of is within 5 s.

// maxAmnesty is the longest amnesty.
const maxAmnesty = 24 * time.Hour

const (
	blockHelp   = `{"zone": "…", "key": "…", "for": "1h"} or {"id": "…", "for": "1h"}`
	unblockHelp = `{"id": "…"} or {"zone": "…", "key": "…"}`
)

func blockClient(ctx context.Context, a *App, r *http.Request) (any, error) {
	request, err := readRequest[blockRequest](r, blockHelp)
	if err != nil {
		return nil, err
	}
	id, err := a.identify(request.who)
	if err != nil {
		return nil, err
	}
	length, err := readDuration("for", request.For, time.Duration(maxByHand)*time.Microsecond)
	if err != nil {
		return nil, err
	}
	p, err := a.penaltyFor(request.Zone, request.Group)
	if err != nil {
		return nil, err
	}
	return a.block(ctx, id, p, length)
}

// penaltyFor returns the penalty of a group in which blocks hold, or of the only one that a zone has, or that there is.
func (a *App) penaltyFor(zone string, group *string) (*Penalty, error) {
	if group != nil && a.penalties[*group] == nil {
		return nil, a.noGroup(*group)
	}
	found := map[string]*Penalty{}
	for _, h := range a.handlers {
		for _, z := range h.zones {
			if h.blocks(z) && (zone == "" || z.charge.Zone == zone) && (group == nil || h.penalty.Group == *group) {
				found[h.penalty.Group] = h.penalty
			}
		}
	}
	if len(found) > 1 {
		return nil, adminError(http.StatusBadRequest, "there are several penalty groups (%s): name one of them as group", quotedNames(sortedNames(found)))
	}
	for _, p := range found {
		return p, nil
	}
	where := "no zone"
	if zone != "" {
		where = fmt.Sprintf("no handler with the zone %q", zone)
	}
	if group != nil {
		where += fmt.Sprintf(" in the penalty group %q", *group)
	}
	return nil, adminError(http.StatusConflict, "%s blocks anybody: it needs a penalty, without dry_run, and a key that holds the client", where)
}

func (a *App) noGroup(group string) error {
	return adminError(http.StatusNotFound, "there is no penalty group %q (groups: %s)", group, quotedNames(sortedNames(a.penalties)))
}

// quotedNames lists names, of which one may be empty.
func quotedNames(names []string) string {
	for i, name := range names {
		names[i] = fmt.Sprintf("%q", name)
	}
	return strings.Join(names, ", ")
}

// blocks says whether requests of a zone can be blocked by this handler.
func (h *Handler) blocks(z *Zone) bool {
	return h.penalty != nil && !h.penalty.DryRun && !h.DryRun && !z.DryRun && z.punishes()
}

// placesOf returns the stores that keep the strikes of a penalty group; nil stands for this process.
func (a *App) placesOf(p *Penalty) (places []*redisStore) {
	for _, h := range a.handlers {
		for _, z := range h.zones {
			place := h.remote
			if h.isLocal(z) {
				place = nil
			}
			if h.blocks(z) && h.penalty.Group == p.Group && !slices.Contains(places, place) {
				places = append(places, place)
			}
		}
	}
	return places
}

// block blocks an identity wherever its strikes are kept. What can be done is done; the error says what could not.
func (a *App) block(ctx context.Context, id ID, p *Penalty, length time.Duration) (blockResult, error) {
	places := a.placesOf(p)
	ends, errs := make([]int64, len(places)), make([]error, len(places))
	a.each(places, func(i int, s *redisStore) { ends[i], errs[i] = a.blockIn(ctx, s, id, &p.rules, length) })
	result := blockResult{ID: id.String(), Group: p.Group, Until: wall(slices.Max(ends)), Stores: storesOf(places, errs)}
	a.logger.Info("blocked", zap.Stringer("id", id), zap.String("group", p.Group), zap.String("by", "admin"), zap.Duration("duration", length),
		zap.Time("until", result.Until), zap.Strings("stores", result.Stores))
	emitBlockedByHand(id, p.Group, result.Until)
	return result, partly("blocked", "on this node the block holds while that does not answer", result.Stores, places, errs)
}

// blockIn blocks an identity in one store, and for a Redis on this node too, even if it does not answer. It returns when the
// latest block ends that there is then.
func (a *App) blockIn(ctx context.Context, s *redisStore, id ID, rules *penaltyRules, length time.Duration) (ends int64, err error) {
	if s == nil {
		return a.stores.local.block(processMicros(), id, rules, length.Microseconds(), int(a.MaxKeys)), nil
	}
	done, err := s.block(ctx, knownBlock{id: id, group: rules.group}, length.Microseconds(), a.longestKnown(s, id, rules))
	now := processMicros()
	heard := heardBlock{until: now + length.Microseconds(), byHand: true, told: done.now, asked: now}
	if done.now == 0 {
		heard = s.told.blocks.setUntold(now, id, rules.group, heard, int(a.MaxKeys))
		return heard.until, err
	}
	if rest := done.ends - done.now; rest > length.Microseconds() { // that for strikes ends later
		heard.until, heard.byHand = now+rest, false
	}
	s.told.blocks.set(now, id, rules.group, heard, int(a.MaxKeys))
	return max(done.ends, now+length.Microseconds()), err
}

// longestKnown returns how long a node may still know of a block that Redis has lost: one for strikes, or one that this node knows of.
func (a *App) longestKnown(s *redisStore, id ID, rules *penaltyRules) int64 {
	now := processMicros()
	return max(rules.max, s.told.blocks.find(now, id, rules.group).until-now)
}

// each does something in every store at once: one that hangs takes no time from the others.
func (a *App) each(places []*redisStore, act func(int, *redisStore)) {
	var acts sync.WaitGroup
	for i, s := range places {
		acts.Go(func() { act(i, s) })
	}
	acts.Wait()
}

// storesOf names the stores without an error, each kind once.
func storesOf(places []*redisStore, errs []error) []string {
	kinds := map[string]bool{}
	for i, s := range places {
		switch {
		case errs[i] != nil:
		case s == nil:
			kinds[SourceMemory.String()] = true
		default:
			kinds[SourceRedis.String()] = true
		}
	}
	return sortedNames(kinds)
}

// partly returns an error that says which stores did not do it, and which did; nil if all did.
func partly(what, here string, done []string, places []*redisStore, errs []error) error {
	var failed []string
	for i, err := range errs {
		if err != nil {
			failed = append(failed, fmt.Sprintf("%s: %s", &places[i].client.settings, err))
		}
	}
	if len(failed) == 0 {
		return nil
	}
	if len(done) == 0 {
		done = []string{"nowhere else"}
	}
	return adminError(http.StatusServiceUnavailable, "not %s in redis %s; %s; %s in: %s", what, strings.Join(failed, " and "), here, what, strings.Join(done, ", "))
}

func unblockClient(ctx context.Context, a *App, r *http.Request) (any, error) {
	request, err := readRequest[unblockRequest](r, unblockHelp)
	if err != nil {
		return nil, err
	}
	id, err := a.identify(request.who)
	if err != nil {
		return nil, err
	}
	amnesty := time.Duration(0)
	if request.Amnesty != "" {
		if amnesty, err = readDuration("amnesty", request.Amnesty, maxAmnesty); err != nil {
			return nil, err
		}
	}
	groups := sortedNames(a.penalties)
	if request.Group != nil {
		if groups = []string{*request.Group}; a.penalties[*request.Group] == nil {
			return nil, a.noGroup(*request.Group)
		}
	}
	if amnesty > 0 && len(groups) == 0 {
		return nil, adminError(http.StatusConflict, "there is no penalty, so refusals are no strikes anyway")
	}
	return a.unblock(ctx, id, groups, amnesty)
}

// unblock forgets the strikes of an identity in some groups and lifts every block, in every store and in what this node remembers.
// What can be done is done; the error says what could not.
func (a *App) unblock(ctx context.Context, id ID, groups []string, amnesty time.Duration) (unblockResult, error) {
	places := append([]*redisStore{nil}, a.remotes...)
	lifted, errs := make([]lifting, len(places)), make([]error, len(places))
	a.each(places, func(i int, s *redisStore) {
		for _, group := range groups {
			one, err := a.unblockIn(ctx, s, id, &a.penalties[group].rules, amnesty.Microseconds())
			if err != nil {
				errs[i] = err
			}
			lifted[i].add(one)
		}
	})
	var all lifting
	for _, one := range lifted {
		all.add(one)
	}
	result := unblockResult{ID: id.String(), Forgotten: all.records}
	fields := []zap.Field{zap.Stringer("id", id), zap.Strings("groups", groups), zap.String("by", "admin"), zap.Int("forgotten", all.records)}
	if amnesty > 0 {
		until := wall(all.amnesty)
		result.Amnesty = &until
		fields = append(fields, zap.Time("amnesty_until", until))
	}
	a.logger.Info("unblocked", fields...)
	if all.records > 0 {
		emitUnblocked(id, groups, all.records)
	}
	return result, partly("unblocked", "other nodes still block, and so does this one when that answers", storesOf(places, errs), places, errs)
}

// lifting is what came of lifting blocks: how many records there were, and until when the latest amnesty is.
type lifting struct {
	records int
	amnesty int64
}

func (l *lifting) add(other lifting) {
	l.records += other.records
	l.amnesty = max(l.amnesty, other.amnesty)
}

// unblockIn lifts the blocks of an identity in one group and one store, and for a Redis on this node, too.
func (a *App) unblockIn(ctx context.Context, s *redisStore, id ID, rules *penaltyRules, amnesty int64) (l lifting, err error) {
	now, had := processMicros(), false
	switch {
	case s != nil:
		var done byHand
		done, err = s.unblock(ctx, id, rules.group, amnesty, a.longestKnown(s, id, rules))
		if had = done.had; err == nil {
			l.amnesty = done.now + amnesty
		}
		// Last, or a request would learn of the block again.
		s.told.blocks.set(processMicros(), id, rules.group, heardBlock{}, int(a.MaxKeys))
	case amnesty > 0:
		had, l.amnesty = a.stores.local.pardon(now, id, rules, amnesty, int(a.MaxKeys))
	default:
		had = a.stores.local.unblock(now, id, rules)
	}
	if had {
		l.records = 1
	}
	return l, err
}
