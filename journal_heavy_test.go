//go:build redis

package ratelimit

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
)

// The flood: so many requests a second, of so many clients in turn, for so long. Each client has one request that is allowed.
const (
	floodRate    = 10_000
	floodClients = 10_000
	floodSeconds = 11
	floodConns   = 8
)

// What ten seconds with 10 000 refusals each leave in the log of a real Caddy. README and docs/logs.md state the numbers.
func TestHeavyLogOfAFlood(t *testing.T) {
	for _, row := range []struct {
		name, penalty            string
		mostRefused, mostBlocked int
	}{
		{"refused", "", 20 + 10*(floodSeconds+1), 0},
		{"blocked", "penalty", 20 + 10*(floodSeconds+1), 200 + 50*(floodSeconds+1)},
	} {
		t.Run(row.name, func(t *testing.T) {
			n := node.Start(t, fmt.Sprintf(":{$PORT} {\n rate_limit {\n %s\n zone api {\n key {header.X-Client}\n rate 1/day\n }\n }\n respond ok\n}", row.penalty))
			begun := time.Now()
			refusals := flood(t, n)
			length := time.Since(begun)
			lines := map[string]int{}
			proc.Eventually(t, "all refusals are summed up", func() bool { return summedUp(n) == refusals })
			for _, line := range n.Logs() {
				if line["logger"] == "http.handlers.rate_limit" {
					lines[fmt.Sprint(line["msg"])]++
				}
			}
			t.Logf("%d refusals in %s: %v", refusals, length.Round(time.Millisecond), lines)
			// A busy machine takes longer, in which more lines are due.
			more := int(max(length-floodSeconds*time.Second, 0).Seconds())
			if lines["refused"] > row.mostRefused+10*more || lines["blocked"] > row.mostBlocked+50*more || lines["refusals"] > 3+more/10 {
				t.Errorf("want at most %d refused, %d blocked and 3 sums", row.mostRefused, row.mostBlocked)
			}
			for what := range lines {
				if what != "refused" && what != "blocked" && what != "refusals" {
					t.Errorf("a line %q", what)
				}
			}
			if refusals < floodRate*(floodSeconds-1) {
				t.Errorf("only %d refusals", refusals)
			}
		})
	}
}

// summedUp returns how many refusals the sums in the log count.
func summedUp(n *node.Node) (total int64) {
	for _, line := range n.Logs() {
		if line["msg"] == "refusals" {
			for _, word := range refusalWords {
				count, _ := line[word].(float64)
				total += int64(count)
			}
		}
	}
	return total
}

// flood sends the requests, ten times a second a part on each connection, and returns how many were refused.
func flood(t *testing.T, n *node.Node) int64 {
	t.Helper()
	var refused atomic.Int64
	var conns sync.WaitGroup
	for i := range floodConns {
		conns.Go(func() {
			conn, err := net.Dial("tcp", n.Addr())
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			go sendFlood(conn, i)
			answers := bufio.NewReader(conn)
			for range floodRate * floodSeconds / floodConns {
				answer, err := http.ReadResponse(answers, nil)
				if err != nil {
					t.Error(err)
					return
				}
				_, _ = io.Copy(io.Discard, answer.Body)
				_ = answer.Body.Close()
				if answer.StatusCode == http.StatusTooManyRequests {
					refused.Add(1)
				}
			}
		})
	}
	conns.Wait()
	return refused.Load()
}

func sendFlood(conn net.Conn, first int) {
	tick := time.NewTicker(time.Second / 10)
	defer tick.Stop()
	const part = floodRate / floodConns / 10
	for i := range floodSeconds * 10 {
		var batch strings.Builder
		for k := range part {
			fmt.Fprintf(&batch, "GET / HTTP/1.1\r\nHost: localhost\r\nX-Client: %d\r\n\r\n", ((i*part+k)*floodConns+first)%floodClients)
		}
		if _, err := io.WriteString(conn, batch.String()); err != nil {
			return // whoever reads sees it too
		}
		<-tick.C
	}
}
