package ratelimit

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// This file holds docs/metrics.md to what a node shows.

// tableRow is a metric in docs/metrics.md: its name and its labels.
var tableRow = regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\| \\w+ \\| ([a-z_` ]*) ?\\|")

// checkTable holds that the documentation lists what is shown, with its labels.
func (s shown) checkTable(t *testing.T) {
	t.Helper()
	text, err := os.ReadFile("docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	listed := map[string]bool{}
	for _, row := range tableRow.FindAllStringSubmatch(string(text), -1) {
		name := "caddy_rate_limit_" + row[1]
		if _, plain := s[name]; !plain {
			name += "_count"
		}
		listed[name] = true
		want := strings.Fields(strings.ReplaceAll(row[2], "`", "") + " instance job")
		slices.Sort(want)
		if got := slices.Sorted(maps.Keys(s[name])); !slices.Equal(got, want) {
			t.Errorf("docs/metrics.md: %s has the labels %q, not %q", name, got, want)
		}
	}
	for name := range s {
		if strings.HasPrefix(name, "caddy_rate_limit_") && !listed[name] && !strings.HasSuffix(name, "_sum") && !strings.HasSuffix(name, "_bucket") {
			t.Errorf("docs/metrics.md does not list %s", name)
		}
	}
}

// classRow is a row of error classes in docs/metrics.md.
var classRow = regexp.MustCompile("(?m)^\\| ((?:`[a-z]+` ?)+) \\| [A-Z]")

// The documentation lists each class of errors, once.
func TestErrorClassesAreDocumented(t *testing.T) {
	text, err := os.ReadFile("docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	var listed []string
	_, table, _ := strings.Cut(string(text), "\n**class** ")
	table, _, _ = strings.Cut(table, "\n## ")
	for _, row := range classRow.FindAllStringSubmatch(table, -1) {
		listed = append(listed, strings.Fields(strings.ReplaceAll(row[1], "`", ""))...)
	}
	slices.Sort(listed)
	if want := slices.Sorted(slices.Values(errorNames)); !slices.Equal(listed, want) {
		t.Errorf("docs/metrics.md lists %q, want %q", listed, want)
	}
}
