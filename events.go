package ratelimit

import (
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
	"go.uber.org/zap"
)

// This file tells Caddy's events app what changes, for handlers that users subscribe there.
//
// Such a handler may take its time, so no request waits for one: events go through one queue, and a goroutine that lives for as long
// as there is something in it. While nobody listens, an event costs two loads.

// eventKind is what happened.
type eventKind uint8

const (
	// eventExceeded is the first refusal of a client for a while.
	eventExceeded eventKind = iota
	// eventBlocked is the start of a block, eventUnblocked that somebody lifted one.
	eventBlocked
	eventUnblocked
	// eventStoreDown and eventStoreUp are about one server of a Redis.
	eventStoreDown
	eventStoreUp
	// eventShed is that a pool has begun to shed.
	eventShed
	eventKinds
)

var eventNames = [eventKinds]string{
	"rate_limit_exceeded", "rate_limit_blocked", "rate_limit_unblocked", "rate_limit_store_down", "rate_limit_store_up", "rate_limit_shed",
}

// maxEvents bounds how many events wait. What comes then is lost, and counted.
const maxEvents = 256

// processEvents is the queue of this process. It is empty, and has no goroutine, most of the time.
var processEvents eventQueue

// eventQueue holds events that wait for their handlers. Its zero value is ready to use.
type eventQueue struct {
	mu      sync.Mutex
	waiting []event
	busy    bool // a goroutine hands them over
}

type event struct {
	kind eventKind
	data map[string]any
}

// emit puts an event into the queue. What it tells is only asked for if somebody may listen.
func emit(kind eventKind, tell func() map[string]any) {
	if app := running.Load(); app == nil || app.deaf[kind].Load() {
		return
	}
	if !processEvents.push(event{kind, tell()}) {
		processBook.lostEvent()
	}
}

// push says whether there was room.
func (q *eventQueue) push(e event) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) >= maxEvents {
		return false
	}
	q.waiting = append(q.waiting, e)
	if !q.busy {
		q.busy = true
		go q.handOver()
	}
	return true
}

// handOver ends when the queue is empty.
func (q *eventQueue) handOver() {
	for {
		q.mu.Lock()
		events := q.waiting
		q.waiting, q.busy = nil, len(events) > 0
		q.mu.Unlock()
		if len(events) == 0 {
			return
		}
		for _, e := range events {
			e.emit()
		}
	}
}

// emit hands an event to the events app of the configuration that has started as a whole: before that, and after its end, its
// subscriptions may be incomplete. A handler that panics takes nothing down with it.
func (e event) emit() {
	defer func() {
		if cause := recover(); cause != nil {
			caddy.Log().Named("rate_limit").Error("a handler of an event panicked", zap.String("event", eventNames[e.kind]), zap.Any("cause", cause))
		}
	}()
	ctx := caddy.ActiveContext()
	events, err := ctx.AppIfConfigured("events")
	if err != nil {
		return
	}
	app, err := ctx.AppIfConfigured("rate_limit")
	if err != nil {
		return
	}
	to, from := events.(*caddyevents.App), app.(*App)
	if !to.ShouldEmit(eventNames[e.kind]) {
		from.deaf[e.kind].Store(true) // subscriptions are closed once a configuration has started
		return
	}
	to.Emit(from.originOf(e.kind), eventNames[e.kind], e.data)
}

// originOf returns the context of the module that an event comes from: a handler for what happens to requests, the app for the rest.
func (a *App) originOf(kind eventKind) caddy.Context {
	ofRequests := kind == eventExceeded || kind == eventBlocked || kind == eventShed
	if ofRequests && a.requests.log != nil {
		return a.requests.ctx
	}
	return a.ctx
}

// emitBlockedByHand tells that an operator set a block.
func emitBlockedByHand(id ID, group string, until time.Time) {
	emit(eventBlocked, func() map[string]any {
		return map[string]any{"id": id.String(), "group": group, "by": "admin", "until": until}
	})
}

// emitUnblocked tells that an operator lifted the blocks of some penalty groups.
func emitUnblocked(id ID, groups []string, forgotten int) {
	emit(eventUnblocked, func() map[string]any {
		return map[string]any{"id": id.String(), "groups": groups, "by": "admin", "forgotten": forgotten}
	})
}

func emitStoreDown(server string, err error) {
	emit(eventStoreDown, func() map[string]any { return map[string]any{"redis": server, "error": err.Error()} })
}

func emitStoreUp(server string, outage time.Duration) {
	emit(eventStoreUp, func() map[string]any { return map[string]any{"redis": server, "outage": outage} })
}
