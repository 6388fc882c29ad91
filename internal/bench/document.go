package bench

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// What is between the markers is written by `make bench`; the text around them is for people and stays.
const (
	beginMarker = "<!-- bench: begin, written by make bench -->\n"
	endMarker   = "<!-- bench: end -->\n"

	reportName, plotName = "performance.md", "performance.svg"
)

// firstText is the document as long as nobody has written another one.
const firstText = "# Performance\n\n" + beginMarker + endMarker

// replaceMarked puts text between the markers of a document.
func replaceMarked(document, text string) (string, error) {
	before, rest, begun := strings.Cut(document, beginMarker)
	_, after, ended := strings.Cut(rest, endMarker)
	if !begun || !ended {
		return "", fmt.Errorf("the document lacks the lines %q and %q", strings.TrimSpace(beginMarker), strings.TrimSpace(endMarker))
	}
	return before + beginMarker + text + endMarker + after, nil
}

// write puts the report and the plot into a folder.
func write(folder, report, svg string) error {
	path := filepath.Join(folder, reportName)
	document, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		document, err = []byte(firstText), nil
	}
	if err != nil {
		return err
	}
	text, err := replaceMarked(string(document), report)
	if err != nil {
		return fmt.Errorf("%s: %w", reportName, err)
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(folder, plotName), []byte(svg), 0o644)
}

// machine says what the numbers were measured on.
type machine struct {
	cores                 int
	system, golang, redis string
	generator             float64 // µs of CPU a request
}

// report is what stands between the markers.
func report(o options, m machine, results []result, micro, memory string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "```sh\n%s\n```\n\n", o.command())
	fmt.Fprintf(&b, "%d cores for everything: clients, Caddy and Redis; %s, %s, Redis %s. ", m.cores, m.system, m.golang, m.redis)
	fmt.Fprintf(&b, "Medians of %d rounds, each against the rounds of bare before and after it; in parentheses the extremes of the rounds. ", o.rounds)
	fmt.Fprintf(&b, "The clients took %.1f µs of CPU a request, which no row includes.\n\n", m.generator)
	fmt.Fprintf(&b, "![Throughput as a part of bare](%s)\n\n", plotName)
	b.WriteString("### What clients notice\n\n" + speedTable(results) + "\n")
	b.WriteString("### What a request costs more than bare\n\n" + costTable(results) + "\n")
	b.WriteString(scenarioList(results) + "\n")
	if micro != "" {
		b.WriteString("### A decision alone\n\n" + micro + "\n")
	}
	if memory != "" {
		b.WriteString("### Bytes in Redis (MEMORY USAGE)\n\n" + memory + "\n")
	}
	return b.String()
}
