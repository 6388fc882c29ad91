package bench

import (
	"fmt"
	"strings"
)

// table is one of Markdown.
type table struct {
	head []string
	rows [][]string
}

func (t *table) add(cells ...string) { t.rows = append(t.rows, cells) }

// String returns the table with the first two columns to the left, numbers to the right.
func (t *table) String() string {
	var b strings.Builder
	line := func(cells []string) {
		b.WriteString("|")
		for _, cell := range cells {
			b.WriteString(" " + strings.ReplaceAll(cell, "|", `\|`) + " |")
		}
		b.WriteString("\n")
	}
	rule := make([]string, len(t.head))
	for i := range rule {
		if rule[i] = "---:"; i < 2 {
			rule[i] = "---"
		}
	}
	line(t.head)
	line(rule)
	for _, row := range t.rows {
		line(row)
	}
	return b.String()
}

// speedTable tells what clients notice.
func speedTable(results []result) string {
	t := table{head: []string{"Scenario", "Server", "requests/s", "× bare", "p50 ms", "p99 ms", "p50 added", "p99 added"}}
	for _, r := range results {
		for i, s := range r.servers {
			row := []string{"", s.name, fmt.Sprintf("%.0f", s.median(func(r round) float64 { return r.perSecond })), "",
				fmt.Sprintf("%.2f", s.median(func(r round) float64 { return milliseconds(r.p50) })),
				fmt.Sprintf("%.2f", s.median(func(r round) float64 { return milliseconds(r.p99) })), "", ""}
			if i == 0 {
				row[0] = r.name
			} else {
				c := compare(r.servers[0], s)
				row[3], row[6], row[7] = c.throughput.format("%.2f"), c.p50.format("%+.2f"), c.p99.format("%+.2f")
			}
			t.add(row...)
		}
	}
	return t.String()
}

// costTable tells what a request costs in addition to the bare server.
func costTable(results []result) string {
	t := table{head: []string{"Scenario", "Server", "Caddy µs", "Redis µs", "both µs", "Redis calls", "commands in Redis", "calls/s"}}
	for _, r := range results {
		for i, c := range r.comparisons() {
			name := ""
			if i == 0 {
				name = r.name
			}
			t.add(name, c.name, c.server.format("%+.1f"), c.redis.format("%+.1f"), c.both.format("%+.1f"),
				fmt.Sprintf("%.3f", c.calls.median), fmt.Sprintf("%.2f", c.executed.median), fmt.Sprintf("%.1f", c.callsPerSecond.median))
		}
	}
	return t.String()
}

// scenarioList tells what the names mean, and what else is to be known.
func scenarioList(results []result) string {
	var b strings.Builder
	for _, r := range results {
		fmt.Fprintf(&b, "- **%s**: %s. Connections: %d", r.name, r.about, r.load.conns)
		if r.roundTrip > 0 && r.distance > 0 {
			fmt.Fprintf(&b, "; a PING took %.2f ms", milliseconds(r.roundTrip))
		}
		if r.outages > 0 && !r.down {
			fmt.Fprintf(&b, "; **Redis was taken for down %d times**, and decisions were made without it", r.outages)
		}
		b.WriteString(".\n")
	}
	return b.String()
}

// format writes the median, and the extremes where there are some.
func (s spread) format(verb string) string {
	text := fmt.Sprintf(verb, s.median)
	if s.low != s.high {
		text += fmt.Sprintf(" ("+verb+" … "+verb+")", s.low, s.high)
	}
	return text
}
