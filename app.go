package ratelimit

import (
	"context"
	"fmt"
	"regexp"
	"sync"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
)

const (
	defaultPrefix  = "tollgate"
	defaultMaxKeys = 1_000_000
)

// processStores holds the buckets that live in this process, for as long as any configuration has a limit, and what each Redis
// told, for as long as one uses it.
var processStores = caddy.NewUsagePool()

// memoryStores are the buckets of this process: those of local zones, and those that stand in for a store that is down.
type memoryStores struct{ local, shares *memoryStore }

// Destruct implements caddy.Destructor.
func (*memoryStores) Destruct() error { return nil }

// App holds what the rate_limit handlers of one configuration share: the defaults for their settings, and zones
// that several of them use by name.
type App struct {
	// Where buckets live, for handlers that do not say it themselves. Default: this process.
	Redis *Redis `json:"redis,omitempty"`

	// How many nodes share the limits in Redis, for handlers that do not say it themselves.
	Nodes Count `json:"nodes,omitempty"`

	// Whether the nodes are counted in Redis while it answers, for handlers that do not say how many there are. Only beside
	// `nodes`.
	NodesAuto bool `json:"nodes_auto,omitempty"`

	// The secret under which identities are hashed before they leave the process. All nodes need the same.
	// Placeholders like `{env.SECRET}` and `{file./run/secrets/key}` are replaced when the configuration loads.
	// Default: none, plain SHA-256; hashed IPv4 addresses can then be found by trying all of them.
	KeySecret string `json:"key_secret,omitempty"`

	// The first part of every key in Redis. One for each environment that shares a Redis. Letters, digits, and any
	// of `-_.:/`. Default `tollgate`.
	Prefix string `json:"prefix,omitempty"`

	// The most buckets that this process keeps. Default 1000000.
	MaxKeys Count `json:"max_keys,omitempty"`

	// How many clients `/rate_limit/top` of the admin endpoint can list: those that ask for most. At most 10000. Default 0:
	// it is not counted.
	Top Count `json:"top,omitempty"`

	// Blocks for clients that keep running into limits, for handlers that do not say it themselves.
	Penalty *Penalty `json:"penalty,omitempty"`

	// Zones for handlers that name them without a definition.
	Zones map[string]*Zone `json:"zones,omitempty"`

	ctx      caddy.Context
	logger   *zap.Logger
	requests emitter                 // a handler
	deaf     [eventKinds]atomic.Bool // nobody listens to events of the kind
	warned   map[string]bool
	hasher   *hasher
	stores   *memoryStores
	holds    bool // the stores, and must release them
	before   *App // that was running when this one was started; it still is if this one is rejected
	ended    bool
	limits   string                 // a hash of all of them
	counts   map[string]*zoneCounts // by zone; held until Cleanup
	// topClients counts who asks for most; nil if nobody wants to know.
	topClients *topSketch
	// unzoned counts requests that no zone decided.
	unzoned *zoneCounts

	// What the handlers of this configuration have in common, by name; the first that names something defines it.
	zones     map[string]*Zone
	places    map[string]string // where the buckets of a zone are
	penalties map[string]*Penalty
	pools     map[string]*Shed
	remotes   []*redisStore // one for each client
	handlers  []*Handler    // in the order in which they were provisioned
}

// emitter is a module in whose name something is said of requests that it is too late to ask for theirs.
type emitter struct {
	ctx caddy.Context
	log *zap.Logger
}

// CaddyModule returns the Caddy module information.
func (*App) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "rate_limit", New: func() caddy.Module { return new(App) }}
}

// Provision implements caddy.Provisioner. It needs no network.
func (a *App) Provision(ctx caddy.Context) (err error) {
	a.ctx, a.logger = ctx, ctx.Logger()
	registerMetrics(ctx, a.logger)
	a.warned, a.places = map[string]bool{}, map[string]string{}
	a.zones, a.penalties, a.pools = map[string]*Zone{}, map[string]*Penalty{}, map[string]*Shed{}
	a.counts = map[string]*zoneCounts{}
	if a.unzoned, err = a.countsOf(""); err != nil {
		return err
	}
	if err := a.setDefaults(); err != nil {
		return err
	}
	if a.Penalty != nil {
		if err := a.Penalty.provision(ctx); err != nil {
			return err
		}
	}
	for _, name := range sortedNames(a.Zones) {
		if a.Zones[name].isReference() {
			return fmt.Errorf("zone %q: a shared zone needs a rate", name)
		}
		if err := a.Zones[name].provision(ctx, name); err != nil {
			return err
		}
		if a.Zones[name].charge.counts, err = a.countsOf(name); err != nil {
			return err
		}
		a.zones[name] = a.Zones[name]
	}
	v, _, err := processStores.LoadOrNew("", func() (caddy.Destructor, error) {
		return &memoryStores{local: newMemoryStore(), shares: newMemoryStore()}, nil
	})
	if err != nil {
		return err
	}
	a.stores, a.holds = v.(*memoryStores), true
	return a.holdTop()
}

var prefixForm = regexp.MustCompile(`^[A-Za-z0-9_.:/-]+$`)

func (a *App) setDefaults() error {
	secret := ""
	if a.KeySecret != "" {
		var err error
		if secret, err = expand(a.KeySecret); err != nil {
			return fmt.Errorf("key_secret: %w", err)
		}
	}
	a.hasher = newHasher(secret)
	if a.Prefix == "" {
		a.Prefix = defaultPrefix
	}
	if !prefixForm.MatchString(a.Prefix) {
		return fmt.Errorf("prefix: must be letters, digits and -_.:/ only, got %q", a.Prefix)
	}
	if a.MaxKeys == 0 {
		a.MaxKeys = defaultMaxKeys
	}
	return checkNodes(a.Nodes, a.NodesAuto)
}

// Start implements caddy.App: from now on connections may be opened in the background. A configuration that is only
// validated never gets here.
func (a *App) Start() error {
	for _, s := range a.remotes {
		s.client.start()
	}
	a.limits = a.limitsHash()
	a.before = running.Swap(a)
	for _, s := range a.remotes {
		if s.counted {
			s.client.announce()
		}
	}
	return nil
}

// Stop implements caddy.App. Requests are still served after it, so nothing ends here but what other nodes think of this one:
// after the last configuration it leaves, and what was not summed up yet is logged.
func (a *App) Stop() error {
	a.end()
	if running.Load() == nil {
		processBook.write()
		a.leaveNodes()
	}
	return nil
}

// leaveNodes takes this process off the lists of nodes. It waits a moment, since the process may be about to exit; what
// is not done by then is done by time.
func (a *App) leaveNodes() {
	ctx, cancel := context.WithTimeout(context.Background(), nodesFarewell)
	defer cancel()
	var farewells sync.WaitGroup
	for _, s := range a.remotes {
		if s.counted {
			farewells.Go(func() { s.client.census.farewell(ctx) })
		}
	}
	farewells.Wait()
}

// end lets operators see the configuration that still runs: the one before, if this one was started and then rejected.
func (a *App) end() {
	before := a.before
	if before != nil && before.ended {
		before = nil
	}
	if running.CompareAndSwap(a, before) {
		before.announceAgain()
	}
	if !a.ended {
		a.announceAgain() // or leave
	}
	a.ended, a.before = true, nil
}

// announceAgain makes the other nodes see which configuration runs, where it may be another one now.
func (a *App) announceAgain() {
	if a == nil || a.limits == "" { // there is none, or it was never started
		return
	}
	for _, s := range a.remotes {
		if s.counted {
			s.client.census.ask()
		}
	}
}

// Cleanup implements caddy.CleanerUpper. An app whose configuration is rejected late is not stopped before. Who still asks
// the app, like a request to the admin endpoint, finds everything in its place.
func (a *App) Cleanup() error {
	a.end()
	a.releaseCounts()
	if !a.holds {
		return nil
	}
	a.holds = false
	for _, s := range a.remotes {
		_, _ = processStores.Delete(s.client.settings.place()) // Destruct returns no error
	}
	if a.topClients != nil {
		_, _ = topSketches.Delete(a.Top) // Destruct returns no error
	}
	_, err := processStores.Delete("")
	return err
}

// remote returns the store for a client, one for all handlers with the same settings.
func (a *App) remote(client *redisClient) (*redisStore, error) {
	for _, s := range a.remotes {
		if s.client == client {
			return s, nil
		}
	}
	v, _, err := processStores.LoadOrNew(client.settings.place(), func() (caddy.Destructor, error) {
		return &hearsay{blocks: newKnownBlocks(), refusals: newRefusalCache(), leases: newLeaseTable()}, nil
	})
	if err != nil {
		return nil, err
	}
	s := &redisStore{client: client, prefix: client.settings.prefix, told: v.(*hearsay)}
	a.remotes = append(a.remotes, s)
	return s, nil
}

// longestBlock returns the longest block that a handler of this configuration can start, in microseconds.
func (a *App) longestBlock() (longest int64) {
	for _, p := range a.penalties {
		longest = max(longest, p.rules.max)
	}
	return longest
}

// Interface guards.
var (
	_ caddy.Provisioner  = (*App)(nil)
	_ caddy.App          = (*App)(nil)
	_ caddy.CleanerUpper = (*App)(nil)
)
