package ratelimit

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
)

// This file holds docs/logs.md to what is logged.

const logsDocs = "docs/logs.md"

// documentedNames returns the names in the last column of the docs' table row about something.
func documentedNames(t *testing.T, what string) []string {
	t.Helper()
	doc, err := os.ReadFile(logsDocs)
	if err != nil {
		t.Fatal(err)
	}
	row := regexp.MustCompile("(?m)^\\| `" + regexp.QuoteMeta(what) + "` \\|.*\\| ([^|]*) \\|$").FindStringSubmatch(string(doc))
	if row == nil {
		t.Fatalf("no row about %q", what)
	}
	var names []string
	for _, match := range regexp.MustCompile("`([a-z_]+)`").FindAllStringSubmatch(row[1], -1) {
		names = append(names, match[1])
	}
	return names
}

// The fields of every line are in its row of the table.
func TestLogsDocsFields(t *testing.T) {
	n := newNewsroom(t, "", "api")
	n.h.LogKey = true
	n.h.zones[0].key, _ = parseKey("", 32, 64)
	n.h.pool.take(7)
	n.refuse("api", 1, ReasonLimited)
	for _, reason := range []Reason{ReasonBlocked, ReasonUnavailable} {
		n.refuse("api", 1, reason)
	}
	c := client("api", 2)
	n.decided(requestFrom("203.0.113.9"), []Charge{c}, &Decision{Reason: ReasonBlocked, Zone: "api", BlockStarted: true, Strikes: 4})
	n.overloaded()
	n.wouldShed()
	n.unclaimed(errEarlyData)
	n.unclaimed(errIdentityRequired)
	n.wait(time.Minute)
	said := map[string][]string{}
	for _, entry := range n.written.TakeAll() {
		for _, field := range entry.Context {
			if !slices.Contains(said[entry.Message], field.Key) {
				said[entry.Message] = append(said[entry.Message], field.Key)
			}
		}
	}
	for _, message := range []string{"refused", "refusals", "blocked", "shedding", "shedding ended"} {
		got, want := said[message], documentedNames(t, message)
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%q has the fields %v, in the docs %v", message, got, want)
		}
	}
}

// The data of events are in the table.
func TestLogsDocsEvents(t *testing.T) {
	c := client("api", 1)
	c.Penalty = new(penaltyRules)
	d := Decision{Reason: ReasonLimited, Zone: "api"}
	exceeded := eventOf(requestFrom("203.0.113.9"), &c, &d)
	if got, want := sortedNames(exceeded), documentedNames(t, "rate_limit_exceeded"); !sameNames(got, want) {
		t.Errorf("rate_limit_exceeded has %v, in the docs %v", got, want)
	}
	for _, name := range eventNames {
		documentedNames(t, name)
	}
}

// The example of events is one that Caddy understands, with events and data that exist.
func TestLogsDocsEventsExample(t *testing.T) {
	example := snippets(t, logsDocs, "caddyfile-events")[0]
	if _, err := adapted(strings.ReplaceAll(example, " exec ", " recorder ")); err != nil {
		t.Error(err)
	}
	for _, line := range regexp.MustCompile(`on (\S+) exec (.*)`).FindAllStringSubmatch(example, -1) {
		if !slices.Contains(eventNames[:], line[1]) {
			t.Errorf("there is no event %s", line[1])
		}
		for _, data := range regexp.MustCompile(`{event\.data\.(\w+)}`).FindAllStringSubmatch(line[2], -1) {
			if !slices.Contains(documentedNames(t, line[1]), data[1]) {
				t.Errorf("%s has no %s", line[1], data[1])
			}
		}
	}
}

func sameNames(a, b []string) bool {
	a, b = slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b))
	return slices.Equal(a, b)
}

// The numbers of the docs are those of the code.
func TestLogsDocsNumbers(t *testing.T) {
	text, err := os.ReadFile(logsDocs)
	if err != nil {
		t.Fatal(err)
	}
	doc, b := strings.Join(strings.Fields(string(text)), " "), newLogbook(processMicros, nil)
	second := time.Second.Microseconds()
	refused, blocked := second/b.refusals.every, second/b.blocks.every
	for _, says := range []string{
		fmt.Sprintf("Of `refused` there are at most %d at once and then %d a second, of `blocked` %d at once and then %d a second", b.refusals.burst, refused, b.blocks.burst, blocked),
		fmt.Sprintf("at most %d lines `refused`, %d `blocked`, and two", b.refusals.burst+10*refused, b.blocks.burst+10*blocked),
		fmt.Sprintf("The %d %03d clients refused last are remembered, in %d kB", recentSlots/1000, recentSlots%1000, recentSlots*8>>10),
		fmt.Sprintf("one queue of %d", maxEvents),
		fmt.Sprintf("at most %d bytes of each", maxLogged),
	} {
		if !strings.Contains(doc, says) {
			t.Errorf("the docs do not say %q", says)
		}
	}
	if lengths := [...]int64{journalPeriod, shedCalm, recentPeriods * journalPeriod}; lengths != [...]int64{10 * second, 10 * second, 600 * second} {
		t.Error("the docs say ten seconds, ten seconds and ten minutes")
	}
}

// loggedForOthers runs Caddy with the log of the docs, and returns the lines of that log and of the access log: of a client whose
// address is 2001:db8::7 that is refused and blocked, and writes what looks like a line into everything that it may write.
func loggedForOthers(t *testing.T) (lines []string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "tollgate.log")
	config := strings.ReplaceAll(snippetsIn(t, logsDocs, "caddyfile-log")[0], "/var/log/caddy/tollgate.log", file)
	config = strings.Replace(config, "{\n", "{\n\tservers {\n\t\ttrusted_proxies static private_ranges\n\t\ttrusted_proxies_strict\n\t}\n", 1)
	n := node.Start(t, config+`
:{$PORT} {
	log {
		output file `+file+`
	}
	rate_limit {
		log_key on
		penalty {
			after 1
		}
		zone "a.b-c" {
			key {client_ip}{header.X-Name}
			rate 1/h
		}
	}
	respond ok
}`)
	forged := `","logger":"http.handlers.rate_limit","msg":"blocked","zone":"a","client_ip":"198.51.100.1"`
	for range 4 {
		_, err := n.Try(http.MethodGet, "/"+forged, "", "X-Forwarded-For: 2001:db8::7", "X-Name: "+forged, "User-Agent: {"+forged)
		if err != nil {
			t.Fatal(err)
		}
	}
	proc.Eventually(t, "everything is logged", func() bool {
		text, err := os.ReadFile(file)
		lines = strings.Split(strings.TrimSpace(string(text)), "\n")
		return err == nil && strings.Count(string(text), `"msg":"handled request"`) == 4
	})
	return lines
}

// The filter finds the blocked client and nobody else, whatever clients write.
func TestLogsDocsFail2ban(t *testing.T) {
	var filter, jail string
	for _, snippet := range snippetsIn(t, logsDocs, "ini") {
		if strings.Contains(snippet, "failregex") {
			filter = snippet
		} else {
			jail = snippet
		}
	}
	if !strings.Contains(jail, "filter = tollgate\n") || !strings.Contains(snippetsIn(t, logsDocs, "caddyfile-log")[0], "output file /var/log/caddy/tollgate.log\n") ||
		!strings.Contains(jail, "logpath = /var/log/caddy/tollgate.log\n") {
		t.Errorf("the jail does not fit to the filter or the log:\n%s", jail)
	}
	lines := loggedForOthers(t)
	if got := banned(t, filter, lines); !slices.Equal(got, []string{"2001:db8::7"}) {
		t.Errorf("banned %q for\n%s", got, strings.Join(lines, "\n"))
	}
	loose := strings.Replace(filter, `"blocked"`, `"(?:blocked|refused)"`, 1)
	if got := banned(t, loose, lines); !slices.Equal(got, []string{"2001:db8::7", "2001:db8::7"}) {
		t.Errorf("with refusals banned %q for\n%s", got, strings.Join(lines, "\n"))
	}
}

// banned does what fail2ban does with a filter: it cuts the date out of a line, and looks for the expression in the rest.
func banned(t *testing.T, filter string, lines []string) (addresses []string) {
	t.Helper()
	value := func(name string) string {
		for line := range strings.Lines(filter) {
			if text, found := strings.CutPrefix(line, name+" = "); found {
				return strings.TrimSpace(text)
			}
		}
		t.Fatalf("no %s in\n%s", name, filter)
		return ""
	}
	date := regexp.MustCompile(strings.ReplaceAll(value("datepattern"), "{EPOCH}", `(\d{10,11}\b(?:\.\d{3,6})?)`) + `(?:\b|\W|$)`)
	const address = `\[?(?:(?:::f{4,6}:)?((?:\d{1,3}\.){3}\d{1,3})|([0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}))\]?`
	fail := regexp.MustCompile(strings.ReplaceAll(value("failregex"), "<ADDR>", address))
	for _, line := range lines {
		at := date.FindStringSubmatchIndex(line)
		if at == nil {
			t.Errorf("no date in %s", line)
			continue
		}
		start := strings.Index(line, `"ts":`)
		if match := fail.FindStringSubmatch(line[:start] + line[at[3]:]); match != nil {
			addresses = append(addresses, match[1]+match[2])
		}
	}
	return addresses
}

// What the parser and the scenario name is in the lines.
func TestLogsDocsCrowdSec(t *testing.T) {
	type static struct{ Meta, Value, Expression, Target string }
	var acquis struct {
		Filenames []string
		Labels    map[string]string
	}
	var parser struct {
		Filter  string
		Statics []static
	}
	var scenario struct{ Type, Filter, Groupby string }
	snippets := snippetsIn(t, logsDocs, "yaml")
	for i, to := range []any{&acquis, &parser, &scenario} {
		if err := yaml.Unmarshal([]byte(snippets[i]), to); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(acquis.Filenames, []string{"/var/log/caddy/tollgate.log"}) || !strings.Contains(parser.Filter, "evt.Parsed.program == '"+acquis.Labels["type"]+"'") {
		t.Errorf("%+v does not lead to the parser %q", acquis, parser.Filter)
	}
	metas := map[string]bool{}
	for _, s := range parser.Statics {
		metas[s.Meta] = true
	}
	for _, match := range regexp.MustCompile(`evt\.Meta\.(\w+)`).FindAllStringSubmatch(scenario.Filter+scenario.Groupby, -1) {
		if !metas[match[1]] {
			t.Errorf("the scenario wants %s, which the parser does not set", match[1])
		}
	}
	found := 0
	for _, line := range loggedForOthers(t) {
		var fields map[string]any
		if err := json.Unmarshal([]byte(line), &fields); err != nil {
			t.Fatal(err)
		}
		if fields["logger"] != "http.handlers.rate_limit" || fields["msg"] == "refusals" {
			continue
		}
		found++
		for _, match := range regexp.MustCompile(`JsonExtract\(evt\.Parsed\.message, '([^']*)'\)`).FindAllStringSubmatch(snippets[1], -1) {
			if fields[match[1]] == nil {
				t.Errorf("no %s in %s", match[1], line)
			}
		}
		if !strings.Contains(parser.Filter, fmt.Sprintf("'%s'", fields["msg"])) {
			t.Errorf("the parser does not want %s", line)
		}
		if fields["client_ip"] != "2001:db8::7" {
			t.Errorf("client_ip is %v", fields["client_ip"])
		}
	}
	if found != 2 || !strings.Contains(scenario.Filter, "'tollgate_blocked'") {
		t.Errorf("%d lines; the scenario is %q", found, scenario.Filter)
	}
}
