package ratelimit

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/VictoriaMetrics/metricsql"
	"go.yaml.in/yaml/v3"
)

// This file holds the alerts to what somebody needs who is woken by one.

// alertRules is what of a file of rules matters here.
type alertRules struct {
	Groups []struct {
		Name  string `yaml:"name"`
		Rules []struct {
			Alert       string            `yaml:"alert"`
			Expr        string            `yaml:"expr"`
			For         string            `yaml:"for"`
			Labels      map[string]string `yaml:"labels"`
			Annotations map[string]string `yaml:"annotations"`
		} `yaml:"rules"`
	} `yaml:"groups"`
}

func readAlerts(t *testing.T) (rules alertRules) {
	t.Helper()
	text, err := os.ReadFile("dashboards/alerts.yml")
	if err != nil {
		t.Fatal(err)
	}
	decoder := yaml.NewDecoder(strings.NewReader(string(text)))
	decoder.KnownFields(true)
	if err := decoder.Decode(&rules); err != nil {
		t.Fatal(err)
	}
	return rules
}

// An alert says whom it wakes and what to do, and does not wake anybody for one bad moment.
func TestAlertsAreWhole(t *testing.T) {
	names := map[string]bool{}
	for _, rule := range readAlerts(t).Groups[0].Rules {
		if names[rule.Alert] {
			t.Errorf("alert %s: there are two", rule.Alert)
		}
		names[rule.Alert] = true
		if severity := rule.Labels["severity"]; !slices.Contains([]string{"critical", "warning", "info"}, severity) {
			t.Errorf("alert %s has the severity %q", rule.Alert, severity)
		}
		for _, text := range []string{"summary", "description", "runbook"} {
			if rule.Annotations[text] == "" {
				t.Errorf("alert %s has no %s", rule.Alert, text)
			}
		}
		lasts, err := time.ParseDuration(rule.For)
		if err != nil || lasts <= 0 {
			t.Errorf("alert %s: for how long? %q", rule.Alert, rule.For)
		}
		for _, window := range windowsOf(t, rule.Expr) {
			if rule.Labels["severity"] == "critical" && lasts <= window {
				t.Errorf("alert %s: one request makes it true for %v, and it fires after %v", rule.Alert, window, lasts)
			}
		}
		checkRunbook(t, rule.Alert, rule.Annotations["runbook"])
	}
}

// windowsOf returns over which times a query looks.
func windowsOf(t *testing.T, query string) (windows []time.Duration) {
	t.Helper()
	parsed, err := metricsql.Parse(query)
	if err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	metricsql.VisitAll(parsed, func(e metricsql.Expr) {
		if r, ok := e.(*metricsql.RollupExpr); ok && r.Window != nil {
			windows = append(windows, time.Duration(r.Window.Duration(0))*time.Millisecond)
		}
	})
	return windows
}

var (
	runbookPage    = regexp.MustCompile(`docs/\w+\.md`)
	runbookPart    = regexp.MustCompile(`"([^"]+)"`)
	runbookCommand = regexp.MustCompile("`caddy rate-limit (\\w+)")
)

// checkRunbook holds that a runbook sends to a part of a page that is there, and to commands that are.
func checkRunbook(t *testing.T, alert, runbook string) {
	t.Helper()
	page := runbookPage.FindString(runbook)
	text, err := os.ReadFile(page)
	if err != nil {
		t.Errorf("alert %s: %v", alert, err)
	}
	parts := runbookPart.FindAllStringSubmatch(runbook, -1)
	if len(parts) == 0 {
		t.Errorf("alert %s: where in %s?", alert, page)
	}
	for _, part := range parts {
		if !strings.Contains(string(text), "\n## "+part[1]+"\n") {
			t.Errorf("alert %s: %s has no part %q", alert, page, part[1])
		}
	}
	for _, command := range runbookCommand.FindAllStringSubmatch(runbook, -1) {
		if !slices.Contains(commandNames(), command[1]) {
			t.Errorf("alert %s: there is no command %s", alert, command[1])
		}
	}
}
