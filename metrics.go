package ratelimit

import (
	"errors"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
)

// This file shows the metrics of the process in the registry of each configuration: which there are, and what they are made of.
// A client is never a label: whoever can make up identities could otherwise make up series.

// metricID is one of the metrics.
type metricID uint8

const (
	metricDecisions metricID = iota
	metricRequests
	metricWouldDeny
	metricNearLimit
	metricStrikes
	metricBlocks
	metricMissingKeys
	metricStoreCalls
	metricStoreErrors
	metricStoreDuration
	metricStoreUp
	metricStoreOutages
	metricNodes
	metricNodeShare
	metricInFlight
	metricInFlightLimit
	metricMemoryEntries
	metricMemoryEvictions
	metricOverrides
	metricLinesSuppressed
	metricCount
)

// metric is what is known of a metric beside its values.
type metric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType // not of a histogram
}

func counterOf(name, help string, labels ...string) metric {
	return metric{prometheus.NewDesc("caddy_rate_limit_"+name, help, labels, nil), prometheus.CounterValue}
}

func gaugeOf(name, help string, labels ...string) metric {
	return metric{prometheus.NewDesc("caddy_rate_limit_"+name, help, labels, nil), prometheus.GaugeValue}
}

// metrics describes all of them. docs/metrics.md says more of each.
var metrics = [metricCount]metric{
	metricDecisions: counterOf("decisions_total",
		"Requests by the zone that decided, what became of them, and who knew.", "zone", "result", "source"),
	metricRequests:      counterOf("zone_requests_total", "Requests that a zone counted, whatever became of them.", "zone"),
	metricWouldDeny:     counterOf("would_deny_total", "Requests that only a dry run kept from being refused.", "zone", "reason"),
	metricNearLimit:     counterOf("near_limit_total", "Requests that were allowed and left a fifth of the burst or less.", "zone"),
	metricStrikes:       counterOf("strikes_total", "Refusals that were a strike.", "zone"),
	metricBlocks:        counterOf("blocks_total", "Blocks that started.", "zone"),
	metricMissingKeys:   counterOf("missing_keys_total", "Requests without the key of a zone.", "zone"),
	metricStoreCalls:    counterOf("store_calls_total", "Calls to Redis. One can carry many decisions.", "redis"),
	metricStoreErrors:   counterOf("store_errors_total", "Calls to Redis that failed.", "redis", "class"),
	metricStoreDuration: gaugeOf("store_call_duration_seconds", "How long calls to Redis took, failed ones too.", "redis"),
	metricStoreUp:       gaugeOf("store_up", "Whether Redis answers: 0 while decisions are made without it.", "redis"),
	metricStoreOutages:  counterOf("store_outages_total", "Times that Redis stopped to answer.", "redis"),
	metricNodes:         gaugeOf("nodes", "Nodes by which limits are divided while Redis does not answer.", "redis"),
	metricNodeShare:     gaugeOf("node_share", "Part of a limit that this node admits while Redis does not answer.", "redis"),
	metricInFlight:      gaugeOf("in_flight", "Requests that hold a slot of a pool.", "pool"),
	metricInFlightLimit: gaugeOf("in_flight_limit", "Slots of a pool.", "pool"),
	metricMemoryEntries: gaugeOf("memory_entries", "What this process keeps about clients.", "table"),
	metricMemoryEvictions: counterOf("memory_evictions_total",
		"Buckets and strikes that were dropped while they still mattered, because max_keys was reached."),
	metricOverrides:       gaugeOf("overrides", "Overrides that hold for a zone while Redis does not answer.", "zone", "action"),
	metricLinesSuppressed: counterOf("log_lines_suppressed_total", "Log lines that were left out because there were too many."),
}

// collector shows the metrics of the configuration that runs. All registries have the same one: what is counted belongs to the
// process, and what is shown to whichever configuration runs when somebody asks.
type collector struct{}

// registerMetrics shows the metrics in the registry of a configuration. That somebody else has a metric of one of the names must
// not keep the configuration from being loaded.
func registerMetrics(ctx caddy.Context, logger *zap.Logger) {
	registry := ctx.GetMetricsRegistry()
	if registry == nil {
		return
	}
	var already prometheus.AlreadyRegisteredError
	if err := registry.Register(collector{}); err != nil && !errors.As(err, &already) {
		logger.Warn("there are no metrics of rate_limit, since another module has one of the same name", zap.Error(err))
	}
}

// Describe implements prometheus.Collector.
func (collector) Describe(all chan<- *prometheus.Desc) {
	for _, m := range metrics {
		all <- m.desc
	}
}

// Collect implements prometheus.Collector.
func (collector) Collect(all chan<- prometheus.Metric) {
	a := running.Load()
	if a == nil {
		return
	}
	s := scrape(all)
	s.unzoned(a.unzoned)
	for _, name := range sortedNames(a.zones) {
		s.zone(name, a.zones[name].charge.counts, a.isRemote(name))
	}
	s.pools(a.poolsInfo())
	s.overrides(overridesShown())
	s.count(metricLinesSuppressed, suppressedLines.Load())
	s.memory(a)
	s.redis(a)
}

// isRemote says whether the buckets of a zone are in Redis.
func (a *App) isRemote(name string) bool {
	for _, h := range a.handlers {
		if z := h.zone(name); z != nil && !h.isLocal(z) {
			return true
		}
	}
	return false
}

// scrape is where the values of one scrape go.
type scrape chan<- prometheus.Metric

// put adds a value. One that cannot be shown is an error of the scrape, not a panic.
func (s scrape) put(id metricID, value float64, labels ...string) {
	m := metrics[id]
	shown, err := prometheus.NewConstMetric(m.desc, m.kind, value, labels...)
	if err != nil {
		shown = prometheus.NewInvalidMetric(m.desc, err)
	}
	s <- shown
}

func (s scrape) count(id metricID, value uint64, labels ...string) {
	s.put(id, float64(value), labels...)
}

// unzoned shows what became of requests that no zone decided.
func (s scrape) unzoned(n *zoneCounts) {
	for r := resultUnavailable; r < resultCount; r++ {
		s.count(metricDecisions, n.decisions[r][SourceNone].Load(), "", resultNames[r], SourceNone.String())
	}
	s.count(metricWouldDeny, n.wouldDeny[resultShed].Load(), "", string(ReasonOverloaded))
}

// zone shows the counts of a zone. What has not happened yet is shown as 0, so that the first time is an increase too.
func (s scrape) zone(name string, n *zoneCounts, remote bool) {
	s.count(metricRequests, n.requests.Load(), name)
	s.count(metricNearLimit, n.near.Load(), name)
	s.count(metricStrikes, n.strikes.Load(), name)
	s.count(metricBlocks, n.blocks.Load(), name)
	s.count(metricMissingKeys, n.missing.Load(), name)
	for _, r := range [...]result{resultLimited, resultBlocked, resultUnavailable, resultRejected} {
		s.count(metricWouldDeny, n.wouldDeny[r].Load(), name, string(refusalReasons[r]))
	}
	for r := range n.decisions {
		for from := range n.decisions[r] {
			count, source := n.decisions[r][from].Load(), Source(from)
			if count > 0 || usual(result(r), source, remote) {
				s.count(metricDecisions, count, name, resultNames[r], source.String())
			}
		}
	}
}

// usual says whether a zone that is kept in Redis, or in memory, can have a result from a source.
func usual(r result, from Source, remote bool) bool {
	switch {
	case r == resultUnavailable:
		return remote && from == SourceNone
	case r > resultUnavailable || from == SourceNone:
		return false
	case from == SourceMemory:
		return !remote
	case from == SourceLease:
		return remote && r == resultAllowed
	case from == SourceCache:
		return remote && r != resultAllowed
	}
	return remote
}

// pools shows how full the pools of slots are.
func (s scrape) pools(pools []poolInfo) {
	for _, p := range pools {
		s.put(metricInFlight, float64(p.InFlight), p.Pool)
		s.put(metricInFlightLimit, float64(p.MaxInFlight), p.Pool)
	}
}

// overrides shows what holds for zones whose store is down, by word of an operator.
func (s scrape) overrides(list []overrideInfo) {
	for _, o := range list {
		s.put(metricOverrides, 1, o.Zone, o.Action)
	}
}

// memory shows what this process keeps: for zones that live here, and in place of a store that is down.
func (s scrape) memory(a *App) {
	stores := a.stores
	buckets, strikes := stores.local.len()
	s.put(metricMemoryEntries, float64(buckets), "buckets")
	s.put(metricMemoryEntries, float64(strikes), "strikes")
	buckets, _ = stores.shares.len()
	s.put(metricMemoryEntries, float64(buckets), "share_buckets")
	s.put(metricMemoryEntries, float64(a.knownBlocks()), "known_blocks")
	s.count(metricMemoryEvictions, stores.local.evicted()+stores.shares.evicted())
}

// redis shows each Redis once, however many clients with other settings it has.
func (s scrape) redis(a *App) {
	shown := map[string]storeInfo{}
	for _, store := range a.remotes {
		info := a.storeInfo(store)
		other, known := shown[info.Redis]
		if !known {
			s.store(info.Redis, store.client.counts)
			other = info
		}
		info.Up, info.Nodes = info.Up && other.Up, max(info.Nodes, other.Nodes)
		shown[info.Redis] = info
	}
	for name, info := range shown {
		up := 0.0
		if info.Up {
			up = 1
		}
		s.put(metricStoreUp, up, name)
		s.put(metricNodes, float64(info.Nodes), name)
		s.put(metricNodeShare, 1/float64(info.Nodes), name)
	}
}

// store shows the counts of a Redis.
func (s scrape) store(name string, n *storeCounts) {
	upTo, calls, seconds := n.durations()
	desc := metrics[metricStoreDuration].desc
	histogram, err := prometheus.NewConstHistogram(desc, calls, seconds, upTo, name)
	if err != nil {
		histogram = prometheus.NewInvalidMetric(desc, err)
	}
	s <- histogram
	s.count(metricStoreCalls, calls, name)
	s.count(metricStoreOutages, n.outages.Load(), name)
	failures := n.failures()
	for _, class := range errorNames {
		s.count(metricStoreErrors, failures[class], name, class)
	}
}
