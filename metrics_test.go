package ratelimit

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	names "github.com/prometheus/common/model"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// exposed is what /metrics of a node shows of ours: each series as it would be asked for, with its labels in their order. Of a
// histogram that is the count.
type exposed map[string]float64

func exposedBy(t *testing.T, n *node.Node) exposed {
	t.Helper()
	return exposedOf(familiesOf(t, n))
}

func familiesOf(t *testing.T, n *node.Node) map[string]*dto.MetricFamily {
	t.Helper()
	answer := n.Admin(http.MethodGet, "/metrics", "")
	if answer.Status != http.StatusOK {
		t.Fatalf("/metrics answers %d: %s", answer.Status, answer.Body)
	}
	parser := expfmt.NewTextParser(names.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(answer.Body))
	if err != nil {
		t.Fatal(err)
	}
	return families
}

func exposedOf(families map[string]*dto.MetricFamily) exposed {
	all := exposed{}
	for name, family := range families {
		if !strings.HasPrefix(name, "caddy_rate_limit_") {
			continue
		}
		for _, m := range family.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			value := m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			all[strings.TrimPrefix(name, "caddy_rate_limit_")+"{"+strings.Join(labels, ",")+"}"] = value
		}
	}
	return all
}

// since returns what was counted since an earlier time.
func (e exposed) since(before exposed) exposed {
	grown := exposed{}
	for series, value := range e {
		if value != before[series] {
			grown[series] = value - before[series]
		}
	}
	return grown
}

// decided returns how many decisions there are with one of the results.
func (e exposed) decided(results ...string) (sum float64) {
	for series, value := range e {
		for _, r := range results {
			if strings.HasPrefix(series, "decisions_total{") && strings.Contains(series, fmt.Sprintf("result=%q", r)) {
				sum += value
			}
		}
	}
	return sum
}

// metricsSite is what the clients meet.
const metricsSite = `{
	admin {$ADMIN}
	servers {
		trusted_proxies static 127.0.0.1/32
		trusted_proxies_strict
	}
	rate_limit {
		{$STORE}
	}
}
http://:{$PORT} {
	rate_limit {
		exempt /health
		penalty {
			after 3
		}
		zone api {
			match {
				path /
			}
			rate  1/h
			burst 1
		}
		zone named {
			match    /named
			key      {header.X-Account}
			on_empty deny
			rate     1/h
		}
		zone tried {
			match /tried
			rate  1/h
			burst 1
			dry_run
		}
		zone twice {
			match /tried
			rate  1/h
			burst 2
		}
	}
	header Config 0
	respond ok
}
`

// metricsAreExact sends the requests of many clients to a node, with three reloads between them, and holds that each answer was
// counted, once, as what it was.
//
// All requests have their answers before a reload begins: Caddy closes the connections of the old configuration then, and of a
// request that was on its way nobody could tell whether it was counted.
func metricsAreExact(t *testing.T, n *node.Node, config string, clients int) {
	t.Helper()
	before := exposedBy(t, n)
	answers := map[int]int{}
	const parts = 4
	for part := range parts {
		for status, count := range surge(t, n, strconv.Itoa(part), clientsFrom(clients/parts*part, clients/parts)) {
			answers[status] += count
		}
		if part == parts-1 {
			break
		}
		// Each reload brings something else: a zone more, what was, and another zone.
		zone := []string{"rate_limit {\n zone more {\n rate 1000/s\n match /more\n}\n}", "", "rate_limit {\n zone less {\n rate 1/s\n match /less\n}\n}"}[part]
		if err := n.Load(strings.Replace(config, "header Config 0", zone+"\nheader Config "+strconv.Itoa(part+1), 1)); err != nil {
			t.Fatal(err)
		}
	}
	after := exposedBy(t, n)
	grown := after.since(before)
	for _, test := range []struct {
		status int
		counts []string
	}{
		{http.StatusOK, []string{"allowed", "exempt"}},
		{http.StatusTooManyRequests, []string{"limited", "blocked"}},
		{http.StatusBadRequest, []string{"rejected"}},
		{http.StatusServiceUnavailable, []string{"unavailable", "shed"}},
	} {
		if counted := grown.decided(test.counts...); counted != float64(answers[test.status]) {
			t.Errorf("%v were counted, and %d answers have status %d", counted, answers[test.status], test.status)
		}
		delete(answers, test.status)
	}
	if len(answers) > 0 {
		t.Errorf("answers of other statuses: %v", answers)
	}
	each := float64(clients)
	for series, want := range map[string]float64{
		`zone_requests_total{zone="api"}`:                        each + each/100*9 + each/100*9, // 1 in 100 asks ten times, 9 in 100 twice
		`zone_requests_total{zone="tried"}`:                      each / 50 * 4,
		`would_deny_total{reason="limited",zone="tried"}`:        each / 50 * 2,
		`missing_keys_total{zone="named"}`:                       each / 50,
		`strikes_total{zone="api"}`:                              each/100*4 + each/100*9,
		`blocks_total{zone="api"}`:                               each / 100,
		`near_limit_total{zone="api"}`:                           0, // a burst of 1
		`near_limit_total{zone="twice"}`:                         each / 50 * 2,
		`zone_requests_total{zone="more"}`:                       0, // it is gone
		`decisions_total{result="exempt",source="none",zone=""}`: each / 50,
	} {
		if grown[series] != want {
			t.Errorf("%s grew by %v, want %v", series, grown[series], want)
		}
	}
	adminCountsTheSame(t, n, after)
	// Nothing is shown of any client, and of zones that are gone: there are as many series as before, and those of the new zone.
	for _, series := range slices.Sorted(maps.Keys(after)) {
		if _, known := before[series]; !known && !strings.Contains(series, `zone="less"`) {
			t.Errorf("after %d clients there is a new series: %s", clients, series)
		}
	}
}

// adminCountsTheSame holds that the list of zones tells what the metrics do.
func adminCountsTheSame(t *testing.T, n *node.Node, metrics exposed) {
	t.Helper()
	var list zonesInfo
	if err := json.Unmarshal([]byte(n.Admin(http.MethodGet, "/rate_limit/zones", "").Body), &list); err != nil || len(list.Zones) != 5 {
		t.Fatalf("%v: %+v", err, list)
	}
	for _, z := range list.Zones {
		refused, wouldDeny := 0.0, 0.0
		for series, value := range metrics {
			ofZone := strings.Contains(series, fmt.Sprintf("zone=%q", z.Zone))
			if ofZone && strings.HasPrefix(series, "decisions_total{") && !strings.Contains(series, `result="allowed"`) {
				refused += value
			}
			if ofZone && strings.HasPrefix(series, "would_deny_total{") {
				wouldDeny += value
			}
		}
		requests := metrics[fmt.Sprintf("zone_requests_total{zone=%q}", z.Zone)]
		if float64(z.Requests) != requests || float64(z.Refused) != refused || float64(z.WouldDeny) != wouldDeny {
			t.Errorf("zone %s: %d requests, %d refused, %d would be; the metrics say %v, %v, %v",
				z.Zone, z.Requests, z.Refused, z.WouldDeny, requests, refused, wouldDeny)
		}
	}
}

func TestMetricsAreExact(t *testing.T) {
	t.Run("memory", func(t *testing.T) {
		config := strings.ReplaceAll(metricsSite, "{$STORE}", "redis off")
		metricsAreExact(t, node.Start(t, config), config, 100_000)
	})
	t.Run("redis", func(t *testing.T) { metricsAreExactWithRedis(t, 10_000) })
}

func metricsAreExactWithRedis(t *testing.T, clients int) {
	t.Helper()
	config := strings.ReplaceAll(metricsSite, "{$STORE}", patientRedis+"nodes 1")
	n := node.Start(t, config, node.Env("REDIS", redistest.Start(t).Addr()))
	proc.Eventually(t, "redis is up", func() bool { return n.LogLines("redis is up") > 0 })
	metricsAreExact(t, n, config, clients)
}

// Whatever else is in a registry, and however often ours is put into it, a configuration loads.
func TestMetricsAreRegisteredOnce(t *testing.T) {
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	defer cancel()
	core, logs := observer.New(zap.WarnLevel)
	for range 2 {
		registerMetrics(ctx, zap.New(core))
	}
	if logs.Len() > 0 {
		t.Errorf("logged: %v", logs.All())
	}
	other, cancelOther := caddy.NewContext(caddy.Context{Context: context.Background()})
	defer cancelOther()
	taken := prometheus.NewCounter(prometheus.CounterOpts{Name: "caddy_rate_limit_strikes_total", Help: "of somebody else"})
	other.GetMetricsRegistry().MustRegister(taken)
	registerMetrics(other, zap.New(core))
	if logs.FilterMessageSnippet("another module").Len() != 1 {
		t.Errorf("a name is taken, and logged is %v", logs.All())
	}
	if _, err := other.GetMetricsRegistry().Gather(); err != nil {
		t.Errorf("the metrics of others: %v", err)
	}
	registerMetrics(caddy.Context{Context: context.Background()}, zap.New(core)) // no registry at all
}
