package bench

import (
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

func TestSpread(t *testing.T) {
	for _, row := range []struct {
		values []float64
		want   spread
	}{
		{nil, spread{}},
		{[]float64{2}, spread{2, 2, 2}},
		{[]float64{3, 1, 2}, spread{2, 1, 3}},
		{[]float64{4, 1, 2, 100}, spread{3, 1, 100}},
	} {
		if got := spreadOf(row.values); got != row.want {
			t.Errorf("%v: got %v, want %v", row.values, got, row.want)
		}
	}
}

// sampleResult is of a machine that becomes faster from round to round, which changes no ratio: ours has 0.8 of the throughput, 2 ms
// more, and uses 5 + 3 µs more.
func sampleResult() result {
	bare, ours := rounds{name: bareName}, rounds{name: oursName}
	at := func(speed float64) round {
		return round{perSecond: 1000 * speed, p50: time.Duration(speed * float64(time.Millisecond)), server: 10 * speed}
	}
	for i := range 4 {
		bare.all = append(bare.all, at(float64(i+1)))
	}
	for i := range 3 {
		r := at(float64(i) + 1.5)
		r.perSecond *= 0.8
		r.p50 += 2 * time.Millisecond
		r.server, r.redis, r.calls = r.server+5, 3, 1
		ours.all = append(ours.all, r)
	}
	return result{scenario: scenario{name: "sample & one", about: "made up", load: load{conns: 64}}, servers: []rounds{bare, ours}}
}

func TestCompareCancelsDrift(t *testing.T) {
	c := sampleResult().comparisons()[0]
	for what, got := range map[string][2]spread{
		"throughput": {c.throughput, {0.8, 0.8, 0.8}}, "p50": {c.p50, {2, 2, 2}}, "server": {c.server, {5, 5, 5}}, "both": {c.both, {8, 8, 8}},
		"calls": {c.calls, {1, 1, 1}}, "requests/s": {c.perSecond, {2000, 1200, 2800}},
	} {
		if got[0].format("%.3f") != got[1].format("%.3f") {
			t.Errorf("%s: got %v, want %v", what, got[0], got[1])
		}
	}
}

func TestTables(t *testing.T) {
	r := sampleResult()
	for want, got := range map[string]string{
		"| sample & one | bare | 2500 |  | 2.50 | 0.00 |  |  |\n|  | Tollgate | 2000 | 0.80 | 4.50 | 0.00 | +2.00 | +0.00 |\n": speedTable([]result{r}),
		"| sample & one | Tollgate | +5.0 | +3.0 | +8.0 | 1.000 | 0.00 | 0.0 |\n":                                              costTable([]result{r}),
		"- **sample & one**: made up. Connections: 64.\n":                                                                      scenarioList([]result{r}),
	} {
		if !strings.HasSuffix(got, want) {
			t.Errorf("got\n%s\nwant the end\n%s", got, want)
		}
	}
	r.outages = 2
	if got := scenarioList([]result{r}); !strings.Contains(got, "down 2 times") {
		t.Errorf("an outage is not told: %s", got)
	}
	if got := (spread{1, 0.5, 2}).format("%+.1f"); got != "+1.0 (+0.5 … +2.0)" {
		t.Errorf("a spread is written as %s", got)
	}
}

func TestPlot(t *testing.T) {
	paced := sampleResult()
	paced.name, paced.load.pace = "paced", 100
	svg := plot([]result{sampleResult(), paced})
	for d := xml.NewDecoder(strings.NewReader(svg)); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("no XML: %v\n%s", err, svg)
		}
	}
	bars := regexp.MustCompile(`<rect class="ours" x="230" y="\d+" width="(\d+)"`).FindAllStringSubmatch(svg, -1)
	if len(bars) != 1 || bars[0][1] != "336" {
		t.Errorf("got the bars %v, want one of 0.8 × 420; what was paced has none", bars)
	}
}

func TestWriteKeepsWhatPeopleWrote(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "docs")
	for _, text := range []string{"first\n", "second\n"} {
		if err := write(folder, text, "<svg/>"); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(folder, reportName)
		document, err := os.ReadFile(path)
		if err != nil || !strings.Contains(string(document), beginMarker+text+endMarker) {
			t.Fatalf("got %q, %v", document, err)
		}
		edited := strings.Replace(string(document), beginMarker, "Written by hand.\n"+beginMarker, 1) + "Its end.\n"
		if err := os.WriteFile(path, []byte(edited), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	document, err := os.ReadFile(filepath.Join(folder, reportName))
	if err != nil || strings.Count(string(document), "Written by hand.\n") != 2 || !strings.Contains(string(document), "Its end.\n") || strings.Contains(string(document), "first") {
		t.Errorf("got %q, %v", document, err)
	}
	if _, err := replaceMarked("no markers", "text"); err == nil {
		t.Error("a document without markers: no error")
	}
}

func TestParseOptions(t *testing.T) {
	parse := func(pairs ...string) (options, error) {
		env := map[string]string{}
		for i := 0; i < len(pairs); i += 2 {
			env[pairs[i]] = pairs[i+1]
		}
		return parseOptions(func(name string) string { return env[name] })
	}
	o, err := parse()
	if err != nil || o.rounds != 7 || o.duration != 2*time.Second || o.rival != nil || len(o.selected()) != len(scenarios()) {
		t.Errorf("defaults: got %+v, %v", o, err)
	}
	o, err = parse("SCENARIO", "^hot$", "BENCH_RIVAL", "other=run --port 8080 http://127.0.0.1:8080/x")
	if err != nil || len(o.selected()) != 1 || *o.rival != (rival{"other", "run --port 8080", "http://127.0.0.1:8080/x"}) {
		t.Errorf("got %+v, %v", o, err)
	}
	if got, want := o.command(), "make bench ROUNDS=7 DURATION=2s SCENARIO='^hot$' BENCH_RIVAL='other=…'"; got != want {
		t.Errorf("command %s, want %s", got, want)
	}
	for _, wrong := range [][2]string{
		{"ROUNDS", "0"}, {"ROUNDS", "x"}, {"DURATION", "2"}, {"DURATION", "-1s"}, {"SCENARIO", "("},
		{"BENCH_RIVAL", "command http://a/"}, {"BENCH_RIVAL", "a=http://a/"}, {"BENCH_RIVAL", "a=command"}, {"BENCH_RIVAL", "a=command https://a/"},
	} {
		if o, err := parse(wrong[0], wrong[1]); err == nil {
			t.Errorf("%s=%s: got %+v and no error", wrong[0], wrong[1], o)
		}
	}
}

func TestParseBenchmark(t *testing.T) {
	got, ok := parseBenchmark("BenchmarkMemoryFlood-2   	 1000	  250.5 ns/op	 0.50 evicted/op	  24 B/op	  1 allocs/op\n")
	if want := "MemoryFlood|0.50 evicted/op|250.5|24|1"; !ok || strings.Join(got, "|") != want {
		t.Errorf("got %q, want %s", got, want)
	}
	for _, line := range []string{"", "ok  	example.org	1.2s", "BenchmarkX", "Benchmark of nothing at all", "PASS"} {
		if got, ok := parseBenchmark(line); ok {
			t.Errorf("%q: got %q", line, got)
		}
	}
}

func TestParseCommands(t *testing.T) {
	before := parseCommands("# Commandstats\r\ncmdstat_info:calls=5,usec=9\r\ncmdstat_evalsha:calls=2,usec=10,usec_per_call=5.00\r\ncmdstat_hset:calls=2,usec=1\r\n")
	after := parseCommands("cmdstat_info:calls=9,usec=9\r\ncmdstat_evalsha:calls=12,usec=10\r\ncmdstat_hset:calls=22,usec=1\r\ncmdstat_time:calls=10,usec=1\r\n")
	if sent, executed := calls(before, after); sent != 10 || executed != 40 {
		t.Errorf("got %d sent and %d executed, want 10 and 40", sent, executed)
	}
	if sent, executed := calls(nil, map[string]int64{"get": 3, "set": 2}); sent != 5 || executed != 5 {
		t.Errorf("without scripts: got %d sent and %d executed, want 5 and 5", sent, executed)
	}
}
