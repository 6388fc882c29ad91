package ratelimit

import (
	"crypto/tls"
	"fmt"
	"strings"
	"testing"
)

// This file holds that a dry run refuses nobody, not even a request that cannot be charged.

// countedBy returns what the zone of a name has counted.
func countedBy(t *testing.T, zone string) string {
	t.Helper()
	a := &App{counts: map[string]*zoneCounts{}}
	defer a.releaseCounts()
	counts, err := a.countsOf(zone)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(strings.Fields(fmt.Sprint(counts.counted())), " ")
}

// What a zone in a dry run cannot charge goes on to the other zones, and to the backend: where the zone is tried, and where the whole
// block is. Without the dry run, each is refused.
func TestDryRunOfWhatCannotBeCharged(t *testing.T) {
	early, proven := &tls.ConnectionState{}, &tls.ConnectionState{HandshakeComplete: true}
	for _, row := range []struct {
		why, zone string
		remote    string
		state     *tls.ConnectionState
		without   int
		mark      string
		counted   string
	}{
		{"without its key", "key {header.X-Must}\non_empty deny", "192.0.2.1:1", proven, 400, "identity_required", "[would be rejected 1 ]"},
		{"in early data", "", "192.0.2.1:1", early, 425, "too_early", "[would be rejected 1 ]"},
		{"on a sensitive route", "key {header.X-Api-Key}\nsensitive", "192.0.2.1:1", early, 425, "too_early", "[would be rejected 1 ]"},
		{"without a client address", "sensitive", "@", proven, 503, "unavailable", "[would be unavailable 1 ]"},
	} {
		for i, dry := range []struct{ inZone, inBlock string }{{}, {inZone: "dry_run"}, {inBlock: "dry_run"}} {
			name := fmt.Sprintf("tried_%d_%d", len(row.why), i)
			// The other zone is asked later: zones are in the order of their names.
			server := served(t, fmt.Sprintf("{\n admin off\n rate_limit {\n redis off\n }\n}\nhttp://:9082 {\n rate_limit {\n dry_run_header X-Dry-Run\n%s\nzone %s {\n rate 1/h\n%s\n%s\n }\n zone %s {\n key {header.X-Other}\n rate 9/h\n }\n }\n respond {header.X-Dry-Run}\n}\n",
				dry.inBlock, name, row.zone, dry.inZone, "z"+name))
			w := requested(server, row.remote, row.state, "/", "X-Other: o")
			if i == 0 {
				if w.Code != row.without {
					t.Errorf("%s: status %d, want %d", row.why, w.Code, row.without)
				}
				continue
			}
			want := fmt.Sprintf("%s;zone=%q", row.mark, name)
			if w.Code != 200 || w.Body.String() != want {
				t.Errorf("%s, in a dry run %+v: status %d, marked %s, want %s", row.why, dry, w.Code, w.Body, want)
			}
			if got := countedBy(t, name); got != row.counted {
				t.Errorf("%s, in a dry run %+v: counted %s, want %s", row.why, dry, got, row.counted)
			}
			if got := countedBy(t, "z"+name); !strings.Contains(got, "[requests 1 allowed memory 1 ]") {
				t.Errorf("%s, in a dry run %+v: the other zone counted %s", row.why, dry, got)
			}
		}
	}
}

// The access log says what a dry run let pass before anything was charged, and who decided then.
func TestAccessLogOfWhatADryRunLetPass(t *testing.T) {
	s := serve(t, `:8080 {
	log
	rate_limit {
		dry_run
		shed 1 {
			pool tried_slots
		}
		zone must {
			match path /must /both
			key {header.X-Must}
			on_empty deny
			rate 1/h
		}
		zone all {
			match /both
			rate 9/h
		}
	}
	respond ok
}`)
	pool, err := acquirePool("tried_slots")
	if err != nil {
		t.Fatal(err)
	}
	defer releasePool("tried_slots")
	ask := func(path string) { s.ask("GET", "http://localhost"+path, "") }
	ask("/must")
	ask("/both")
	pool.take(1)
	ask("/none")
	ask("/both")
	pool.release()
	ask("/none")
	want := []string{
		"must allowed cost 0 would_deny identity_required | must 0 (identity_required)",
		"all allowed memory cost 1 would_deny identity_required | must 0 (identity_required), all 1",
		"allowed cost 0 would_deny overloaded of tried_slots |",
		"all allowed memory cost 1 would_deny overloaded of tried_slots | must 0 (identity_required), all 1",
		"nothing",
	}
	lines := accessLines(t, s)
	for i, line := range lines {
		text := "nothing"
		if line != nil {
			text = describeLine(line)
		}
		if text != want[i] {
			t.Errorf("line %d says\n%s\nwant\n%s", i, text, want[i])
		}
	}
	if len(lines) != len(want) {
		t.Errorf("%d lines", len(lines))
	}
}
