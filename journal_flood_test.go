package ratelimit

import (
	"fmt"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/node"
)

// A flood of refusals leaves a bounded number of lines, whoever it comes from: in ten seconds with 10 000 refusals each, at most 120 first
// refusals and two sums. All of it is in the sums.
func TestLogOfAFlood(t *testing.T) {
	for clients, want := range map[int]int{1: 1, 50: 50, 100_000: 119} {
		n := newNewsroom(t, "", "api")
		r := requestFrom("203.0.113.9")
		for i := range 100_000 { // 7 s in one period, 3 in the next
			c := client("api", i%clients)
			n.decided(r, []Charge{c}, &Decision{Reason: ReasonLimited, Zone: "api", Now: n.micros})
			n.wait(100 * time.Microsecond)
		}
		n.wait(10 * time.Second)
		refused, sums, total := 0, 0, uint64(0)
		for _, entry := range n.written.TakeAll() {
			switch entry.Message {
			case "refused":
				refused++
			case "refusals":
				sums++
				limited, _ := entry.ContextMap()["limited"].(uint64)
				total += limited
			}
		}
		if refused != want || sums != 2 || total != 100_000 {
			t.Errorf("%d clients: %d lines of first refusals, %d sums of %d refusals; want %d, 2 and 100000", clients, refused, sums, total, want)
		}
	}
}

// What was not summed up yet is written when Caddy stops; a reload in between loses nothing.
func TestSumsAreWrittenAtTheEnd(t *testing.T) {
	site := ":{$PORT} {\n rate_limit {\n zone api {\n key {header.X-Client}\n rate 1/h\n burst 1\n }\n }\n respond ok\n}"
	n := node.Start(t, site)
	refused := 0
	for round := range 3 {
		for i := range 20 {
			if n.Get("/", fmt.Sprintf("X-Client: %d", i%4)).Status == 429 {
				refused++
			}
		}
		if round < 2 {
			if err := n.Load(site); err != nil {
				t.Fatal(err)
			}
		}
	}
	if code := n.Stop(); code != 0 {
		t.Errorf("Caddy ended with %d", code)
	}
	limited, lines := 0, 0
	for _, line := range n.Logs() {
		switch line["msg"] {
		case "refusals":
			count, _ := line["limited"].(float64)
			limited += int(count)
		case "refused":
			lines++
		}
	}
	if refused != 56 || limited != refused || lines != 4 {
		t.Errorf("%d refusals, summed up %d, and %d lines of first refusals; want 56, 56 and 4", refused, limited, lines)
	}
}
