package ratelimit

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"
)

// accessLine is the field on a line of the access log.
type accessLine struct {
	Zone      string
	Decision  string
	Source    string
	Remaining *int64
	Cost      int64
	ID        string
	At        int64
	WouldDeny string `json:"would_deny"`
	Pool      string
	Zones     []struct {
		Zone, ID  string
		Cost, At  int64
		WouldDeny string `json:"would_deny"`
		Spared    bool
	}
}

// accessLines returns what the access log of a server says about requests, those without the field as nil.
func accessLines(t *testing.T, s *testServer) (lines []*accessLine) {
	t.Helper()
	for _, text := range loggedBy(t, s, "handled request") {
		var line struct {
			RateLimit *accessLine `json:"rate_limit"`
		}
		if err := json.Unmarshal([]byte(text), &line); err != nil {
			t.Fatal(err)
		}
		lines = append(lines, line.RateLimit)
	}
	return lines
}

// A line says who was charged what in which zone, what came of it, and when: also if several blocks had their say.
func TestAccessLogSaysWhatWasDecided(t *testing.T) {
	s := serve(t, `:8080 {
	log
	rate_limit /a/* {
		exempt /a/health
		zone tight {
			rate 3/h
			cost 2
		}
		zone wide {
			key {header.X-Refuse}
			rate 100/h
		}
		zone tried {
			rate 1/h
			dry_run
		}
		zone strict {
			match /a/strict
			key {header.X-Api-Key}
			on_empty deny
			rate 1/h
		}
	}
	route {
		rate_limit {
			zone last {
				rate 9/h
			}
		}
		respond ok
	}
}`)
	before := time.Now().UnixMicro()
	for _, path := range []string{"/a/1", "/a/2", "/a/health", "/a/strict", "/b"} {
		s.ask("GET", "http://localhost"+path, "alice")
	}
	var got []string
	for _, line := range accessLines(t, s) {
		text := "nothing"
		if line != nil {
			text = describeLine(line)
			if line.At < before || line.At > time.Now().UnixMicro() {
				t.Errorf("decided at %d", line.At)
			}
		}
		got = append(got, text)
	}
	want := []string{
		"tight allowed memory remaining 1 cost 2 | tight 2, tried 1, wide 1, last 1",
		"tight limited memory remaining 1 cost 2 would_deny limited | tight 2, tried 1 (limited), wide 1",
		"last allowed memory remaining 7 cost 1 | last 1",
		"identity_required cost 0 |",
		"last allowed memory remaining 6 cost 1 | last 1",
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("the access log says\n%q\nwant\n%q", got, want)
	}
}

// Whether a refusal may strike is part of the decision.
func TestAccessLogSaysWhoIsSpared(t *testing.T) {
	s := serve(t, `:8080 {
	log
	rate_limit {
		penalty {
			except /static/*
		}
		zone api {
			rate 100/h
		}
		zone everybody {
			key all
			rate 100/h
		}
	}
	respond ok
}`)
	s.ask("GET", "http://localhost/a", "")
	s.ask("GET", "http://localhost/static/a", "")
	lines := accessLines(t, s)
	for i, want := range []bool{false, true} {
		if zones := lines[i].Zones; zones[0].Spared != want || zones[1].Spared {
			t.Errorf("request %d: %+v", i, zones)
		}
	}
}

func describeLine(l *accessLine) string {
	text := l.Decision
	if l.Zone != "" {
		text = l.Zone + " " + text
	}
	if l.Source != "" {
		text += " " + l.Source
	}
	if l.Remaining != nil {
		text += fmt.Sprint(" remaining ", *l.Remaining)
	}
	text += fmt.Sprint(" cost ", l.Cost)
	if l.WouldDeny != "" {
		text += " would_deny " + l.WouldDeny
		if l.Pool != "" {
			text += " of " + l.Pool
		}
	}
	text += " |"
	for i, z := range l.Zones {
		if i > 0 {
			text += ","
		}
		text += fmt.Sprintf(" %s %d", z.Zone, z.Cost)
		if z.WouldDeny != "" {
			text += " (" + z.WouldDeny + ")"
		}
	}
	return text
}
