//go:build bench

package bench

import (
	"fmt"
	"os"
	"runtime"
	"testing"
)

// TestBench measures everything; `make bench` runs it. The report goes to the standard output, and with BENCH_DOCS into that folder.
func TestBench(t *testing.T) {
	o, err := parseOptions(os.Getenv)
	if err != nil {
		t.Fatal(err)
	}
	selected := o.selected()
	if len(selected) == 0 {
		t.Fatalf("no scenario matches %q", o.only)
	}
	var results []result
	for _, sc := range selected {
		t.Run(sc.name, func(t *testing.T) {
			results = append(results, run(t, sc, o))
			t.Logf("\n%s\n%s", speedTable(results[len(results)-1:]), costTable(results[len(results)-1:]))
		})
	}
	if t.Failed() {
		return // half a report would look like a whole one
	}
	m := machine{cores: runtime.NumCPU(), system: runtime.GOOS + "/" + runtime.GOARCH, golang: runtime.Version(), redis: redisVersion(t), generator: generatorCost(results)}
	text := report(o, m, results, microTable(t), bytesTable(t))
	fmt.Fprintln(os.Stdout, text)
	if o.docs == "" || t.Failed() {
		return
	}
	if err := write(o.docs, text, plot(results)); err != nil {
		t.Fatal(err)
	}
}
