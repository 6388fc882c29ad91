//go:build soak

package ratelimit

import (
	"strings"
	"testing"
)

// The tables of docs/scaling.md.
func TestSoakScaling(t *testing.T) {
	for _, part := range []struct {
		name      string
		perSecond func(nodes int) int
		limit     func(nodes int) Limit
	}{
		{"the same load on more nodes", func(int) int { return 20_000 }, func(int) Limit { return perSecond(500) }},
		{"more load on more nodes, far from the limit", func(n int) int { return 1000 * n }, func(n int) Limit { return perSecond(1000 * int64(n)) }},
		{"more load on more nodes, hot keys far over a slow limit", func(n int) int { return 1000 * n }, func(int) Limit { return Limit{Num: 5, Den: 3, Burst: 100 * Token} }},
	} {
		rows := []string{part.name, "", simulationHead}
		for _, nodes := range []int{1, 10, 100, 1000} {
			for _, leases := range []bool{false, true} {
				s, err := simulate(traffic{nodes: nodes, perSecond: part.perSecond(nodes), seconds: 5, limit: part.limit(nodes), leases: leases})
				if err != nil {
					t.Fatalf("%d nodes: %v", nodes, err)
				}
				rows = append(rows, s.String())
			}
		}
		t.Log(strings.Join(rows, "\n"))
	}
}
