package ratelimit

import (
	"context"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// This file finds the way to the servers of a Redis Cluster. Which of them keeps a key, go-redis knows; each master has an
// endpoint of its own, so that one that does not answer costs the keys of the others nothing.

const (
	// How often the masters are asked for while all of them are up, and while one is not: then another may take its place. One
	// that was asked once, and gave no answer, may be down too: where requests are rare, the next one must not find that out
	// again.
	learnCalm, learnSoon = 10 * time.Second, 250 * time.Millisecond
	// learnTimeout bounds asking.
	learnTimeout = 3 * time.Second
	// probeTries bounds the search for a key that a master keeps. One of a thousand masters has a slot in a thousand.
	probeTries = 200_000
)

// cluster is an open wire to a Redis Cluster.
type cluster struct {
	client *redisClient
	redis  *redis.ClusterClient
	ctx    context.Context
	// seeds stands for all masters until they are known.
	seeds *endpoint
	// stale is told that the masters may be others by now.
	stale chan struct{}

	mu      sync.RWMutex
	masters map[*redis.Client]*endpoint // nil until they are known
}

// openCluster opens a wire to a Redis Cluster.
func (c *redisClient) openCluster(ctx context.Context) *wire {
	s := &c.settings
	k := &cluster{client: c, ctx: ctx, stale: make(chan struct{}, 1)}
	k.redis = redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: s.addressList(), Username: s.username, Password: s.password, TLSConfig: s.tlsConfig(), Dialer: s.tls.dialer(),
		Protocol: 2, DisableIdentity: true, DisableRoutingPolicies: true,
		MaxRetries: -1, DialerRetries: 1, DialTimeout: dialTimeout, ContextTimeoutEnabled: true,
		ReadTimeout: s.timeout, WriteTimeout: s.timeout,
		PoolSize: s.poolSize, MaxActiveConns: s.poolSize, MinIdleConns: min(warmConns, s.poolSize),
		PipelinePoolSize:         -1,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
	k.seeds = newEndpoint(ctx, c, s.String())
	go k.watch()
	return &wire{
		route:   k.route,
		servers: k.servers,
		any:     func() redis.UniversalClient { return k.redis },
		shut:    k.shut,
	}
}

// route returns the endpoint of the master that keeps a key.
func (k *cluster) route(key string) *endpoint {
	k.mu.RLock()
	known := k.masters != nil
	k.mu.RUnlock()
	if !known {
		return k.seeds
	}
	node, err := k.redis.MasterForKey(k.ctx, key) // needs no network once the masters are known
	if err != nil {
		return k.seeds
	}
	k.mu.RLock()
	e := k.masters[node]
	k.mu.RUnlock()
	if e == nil && !k.keeps(node, key) {
		return k.seeds
	}
	if e == nil {
		e = k.meet(node)
	}
	return e
}

// servers returns the endpoints of the masters, or of the seeds until they are known.
func (k *cluster) servers() []*endpoint {
	k.mu.RLock()
	defer k.mu.RUnlock()
	if len(k.masters) == 0 {
		return []*endpoint{k.seeds}
	}
	return slices.Collect(maps.Values(k.masters))
}

// keeps says whether a node keeps a key. For one of a slot that nobody serves, go-redis names any node, another one each time; it
// can be a replica, of which nobody should wait to hear that it is up.
func (k *cluster) keeps(node *redis.Client, key string) bool {
	for range 20 {
		if other, err := k.redis.MasterForKey(k.ctx, key); err != nil || other != node {
			return false
		}
	}
	return true
}

// meet makes the endpoint of a master.
func (k *cluster) meet(node *redis.Client) *endpoint {
	k.mu.Lock()
	defer k.mu.Unlock()
	if e := k.masters[node]; e != nil {
		return e
	}
	e := newEndpoint(k.ctx, k.client, node.Options().Addr)
	e.follow, e.lost = k.follow, k.ask
	e.probeKey = func() (string, bool) { return k.keyOf(node) }
	e.use(node)
	k.masters[node] = e
	go e.probe(e.answers, 0)
	return e
}

// keyOf returns a key that a master keeps.
func (k *cluster) keyOf(node *redis.Client) (string, bool) {
	for i := range probeTries {
		if i%1000 == 999 && k.ctx.Err() != nil {
			break
		}
		key := k.client.settings.prefix + ":{probe" + strconv.Itoa(i) + "}"
		if keeper, err := k.redis.MasterForKey(k.ctx, key); err == nil && keeper == node {
			return key, true
		}
	}
	return "", false
}

// follow sends a command that was redirected, through go-redis, which goes on where the redirection says.
func (k *cluster) follow(ctx context.Context, cmd redis.Cmder) error {
	k.ask()
	return k.redis.Process(ctx, cmd)
}

// ask makes watch ask for the masters soon.
func (k *cluster) ask() {
	select {
	case k.stale <- struct{}{}:
	default: // told already
	}
}

// watch keeps the endpoints those of the masters.
func (k *cluster) watch() {
	k.seeds.probe(k.learn, 0)
	for {
		select {
		case <-k.ctx.Done():
			return
		case <-k.stale:
			if !sleep(k.ctx, probeFirst) { // many commands find out at once
				return
			}
		case <-time.After(k.pause()):
		}
		_ = k.learn() // what cannot be learnt now can be soon
	}
}

// pause returns how long what is known about the masters is good for.
func (k *cluster) pause() time.Duration {
	k.mu.RLock()
	defer k.mu.RUnlock()
	for _, e := range k.masters {
		if e.breaker.doubted(processMicros(), learnCalm.Microseconds()) {
			return learnSoon
		}
	}
	return learnCalm
}

// learn asks for the masters.
func (k *cluster) learn() error {
	ctx, cancel := context.WithTimeout(k.ctx, learnTimeout)
	defer cancel()
	var mu sync.Mutex
	found := map[*redis.Client]bool{}
	err := k.redis.ForEachMaster(ctx, func(_ context.Context, node *redis.Client) error {
		mu.Lock()
		defer mu.Unlock()
		found[node] = true
		return nil
	})
	if err != nil {
		return err
	}
	k.mu.Lock()
	if k.masters == nil {
		k.masters = map[*redis.Client]*endpoint{}
	}
	var gone []*endpoint
	maps.DeleteFunc(k.masters, func(node *redis.Client, e *endpoint) bool {
		if found[node] {
			return false
		}
		gone = append(gone, e)
		return true
	})
	k.mu.Unlock()
	for _, e := range gone {
		go e.shut() // waits for what is on its way
	}
	for node := range found {
		k.meet(node)
	}
	return nil
}

// shut closes all connections.
func (k *cluster) shut() {
	k.mu.Lock()
	masters := k.masters
	k.masters = map[*redis.Client]*endpoint{}
	k.mu.Unlock()
	for _, e := range masters {
		e.shut()
	}
	_ = k.redis.Close()
}
