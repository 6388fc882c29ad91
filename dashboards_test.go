package ratelimit

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/VictoriaMetrics/metricsql"
	dto "github.com/prometheus/client_model/go"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// dashboard is what of a Grafana dashboard matters here.
type dashboard struct {
	UID         string
	Panels      []panel
	Templating  struct{ List []variable }
	Annotations struct{ List []struct{ Name, Expr string } }
}

type panel struct {
	ID          int
	Type, Title string
	Description string
	Datasource  struct{ UID string }
	GridPos     struct{ X, Y, W, H int }
	Targets     []struct{ Expr, LegendFormat string }
	FieldConfig struct{ Defaults struct{ Unit string } }
}

type variable struct{ Name, Type, Definition string }

func readDashboard(t *testing.T) (d dashboard) {
	t.Helper()
	text, err := os.ReadFile("dashboards/tollgate.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	return d
}

// shown is what a node exposes: of each metric its labels, and of each label its values.
type shown map[string]map[string][]string

// whatIsShown returns what a node exposes that has everything: Redis, a pool, a zone, an override.
func whatIsShown(t *testing.T) shown {
	t.Helper()
	n := node.Start(t, site(patientRedis+"nodes 1", "zone api {\n rate 1/h\n burst 1\n}\npenalty\nshed"), node.Env("REDIS", redistest.Start(t).Addr()))
	proc.Eventually(t, "redis is up", func() bool { return n.LogLines("redis is up") > 0 })
	if answer := n.Admin(http.MethodPost, "/rate_limit/override", `{"zone": "api", "action": "allow", "for": "1m"}`); answer.Status != http.StatusOK {
		t.Fatalf("override: %+v", answer)
	}
	all := shown{"up": {"job": nil, "instance": nil}} // Prometheus itself shows it
	for name, family := range familiesOf(t, n) {
		labels := map[string][]string{"job": nil, "instance": nil} // of whoever scrapes
		for _, m := range family.GetMetric() {
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = append(labels[l.GetName()], l.GetValue())
			}
		}
		all[name] = labels
		if family.GetType() == dto.MetricType_HISTOGRAM {
			delete(all, name) // nobody can ask for it without a suffix
			all[name+"_sum"], all[name+"_count"] = labels, labels
			all[name+"_bucket"] = maps.Clone(labels)
			all[name+"_bucket"]["le"] = nil
		}
	}
	return all
}

// check holds that a query is PromQL, and asks for what is shown; it returns the metrics that it asks for.
func (s shown) check(t *testing.T, where, query string) (used []string) {
	t.Helper()
	query = strings.NewReplacer("$__rate_interval", "5m").Replace(query)
	parsed, err := metricsql.Parse(query)
	if err != nil {
		t.Errorf("%s: %s: %v", where, query, err)
		return nil
	}
	metricsql.VisitAll(parsed, func(e metricsql.Expr) {
		if m, ok := e.(*metricsql.MetricExpr); ok {
			used = append(used, s.checkMetric(t, where, m))
		}
	})
	if len(used) == 0 {
		t.Errorf("%s: %s asks for nothing", where, query)
	}
	metricsql.VisitAll(parsed, func(e metricsql.Expr) {
		aggregate, ok := e.(*metricsql.AggrFuncExpr)
		if !ok {
			return
		}
		for _, label := range aggregate.Modifier.Args {
			for _, name := range used {
				if _, known := s[name][label]; !known {
					t.Errorf("%s: %s has no label %s: %s", where, name, label, query)
				}
			}
		}
	})
	return used
}

// filterWords are what a filter can be equal to: a label's value, or several.
var filterWords = regexp.MustCompile(`^[a-z_]+(\|[a-z_]+)*$`)

func (s shown) checkMetric(t *testing.T, where string, m *metricsql.MetricExpr) (name string) {
	t.Helper()
	for _, filter := range m.LabelFilterss[0] {
		if filter.Label == "__name__" {
			name = filter.Value
			continue
		}
		values, known := s[name][filter.Label]
		if !known {
			t.Errorf("%s: %s has no label %s", where, name, filter.Label)
		}
		if !filterWords.MatchString(filter.Value) { // a variable
			continue
		}
		for word := range strings.SplitSeq(filter.Value, "|") {
			if !slices.Contains(values, word) {
				t.Errorf("%s: %s{%s} is never %q: it is one of %q", where, name, filter.Label, word, slices.Compact(slices.Sorted(slices.Values(values))))
			}
		}
	}
	if _, known := s[name]; !known {
		t.Errorf("%s: there is no metric %q", where, name)
	}
	return name
}

var (
	legendLabels = regexp.MustCompile(`\{\{(\w+)\}\}`)
	groupedBy    = regexp.MustCompile(`^(?:60 \* |histogram_quantile\([0-9.]+, )?(?:sum|min|max) by \(([^)]*)\)`)
	labelValues  = regexp.MustCompile(`^label_values\((.+), (\w+)\)$`)
	alertLabels  = regexp.MustCompile(`\$labels\.(\w+)`)
)

// groups says whether the outermost aggregation of a query keeps a label.
func groups(query, label string) bool {
	match := groupedBy.FindStringSubmatch(query)
	return len(match) > 1 && slices.Contains(strings.Split(match[1], ", "), label)
}

// What the dashboard and the alerts ask for is what a node shows, and of all that it shows, the dashboard leaves nothing out.
func TestDashboardsAskForWhatIsShown(t *testing.T) {
	s, used := whatIsShown(t), map[string]bool{}
	ask := func(where, query string) {
		for _, name := range s.check(t, where, query) {
			used[name] = true
		}
	}
	d := readDashboard(t)
	for _, v := range d.Templating.List {
		if v.Type != "query" {
			continue
		}
		match := labelValues.FindStringSubmatch(v.Definition)
		if match == nil {
			t.Fatalf("variable %s: %s", v.Name, v.Definition)
		}
		ask("variable "+v.Name, fmt.Sprintf("sum by (%s) (%s)", match[2], match[1]))
	}
	for _, a := range d.Annotations.List[1:] { // the first is built in
		ask("annotation "+a.Name, a.Expr)
	}
	for _, p := range d.Panels {
		for _, target := range p.Targets {
			ask("panel "+p.Title, target.Expr)
			for _, label := range legendLabels.FindAllStringSubmatch(target.LegendFormat, -1) {
				if !groups(target.Expr, label[1]) {
					t.Errorf("panel %s: the legend %s names a label that the query does not keep: %s", p.Title, target.LegendFormat, target.Expr)
				}
			}
		}
	}
	for name := range s {
		if strings.HasPrefix(name, "caddy_rate_limit_") && !used[name] {
			t.Errorf("no panel shows %s", name)
		}
	}
	for _, snippet := range snippetsIn(t, "docs/metrics.md", "promql") {
		s.check(t, "docs/metrics.md", snippet)
	}
	s.checkTable(t)
	for _, rule := range readAlerts(t).Groups[0].Rules {
		s.check(t, "alert "+rule.Alert, rule.Expr)
		for _, text := range rule.Annotations {
			for _, label := range alertLabels.FindAllStringSubmatch(text, -1) {
				if !groups(rule.Expr, label[1]) && groupedBy.MatchString(rule.Expr) {
					t.Errorf("alert %s names the label %s, which its query does not keep", rule.Alert, label[1])
				}
			}
		}
	}
}

// A dashboard can be imported anywhere, and each panel says what it shows.
func TestDashboardsAreWhole(t *testing.T) {
	d := readDashboard(t)
	ids, rows := map[int]bool{}, []string{}
	for i, p := range d.Panels {
		if ids[p.ID] {
			t.Errorf("panel %s: its id is another's", p.Title)
		}
		ids[p.ID] = true
		if p.GridPos.X+p.GridPos.W > 24 || p.GridPos.H == 0 {
			t.Errorf("panel %s: it stands at %+v", p.Title, p.GridPos)
		}
		for _, q := range d.Panels[:i] {
			a, b := p.GridPos, q.GridPos
			if a.X < b.X+b.W && b.X < a.X+a.W && a.Y < b.Y+b.H && b.Y < a.Y+a.H {
				t.Errorf("panels %s and %s stand in the same place", p.Title, q.Title)
			}
		}
		if p.Type == "row" {
			rows = append(rows, p.Title)
			continue
		}
		if p.Datasource.UID != "${datasource}" || p.FieldConfig.Defaults.Unit == "" || p.Description == "" || len(p.Targets) == 0 {
			t.Errorf("panel %s lacks something: %+v", p.Title, p)
		}
	}
	if want := []string{"Decisions", "Refused and blocked", "Redis", "Capacity"}; !slices.Equal(rows, want) {
		t.Errorf("the rows are %q, want %q", rows, want)
	}
}
