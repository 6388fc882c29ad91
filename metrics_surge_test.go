package ratelimit

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/caddy-tollgate/ratelimit/internal/node"
)

// This file sends the requests of very many clients in little time.

// surge gets paths, each for a client at an address, and counts the answers by status. Each of its connections sends many requests
// before it reads the first answer. They are connections to the configuration of a name: just after a reload, the one before may
// still be listening. It returns when every request has its answer.
func surge(t *testing.T, n *node.Node, config string, requests []visitTo) map[int]int {
	t.Helper()
	const connections = 8
	var wg sync.WaitGroup
	statuses := make([]map[int]int, connections)
	errs := make([]error, connections)
	for c := range connections {
		statuses[c] = map[int]int{}
		wg.Go(func() {
			from, to := len(requests)*c/connections, len(requests)*(c+1)/connections
			errs[c] = pipeline(n.Addr(), config, requests[from:to], statuses[c])
		})
	}
	wg.Wait()
	all := map[int]int{}
	for c := range connections {
		if errs[c] != nil {
			t.Fatal(errs[c])
		}
		for status, count := range statuses[c] {
			all[status] += count
		}
	}
	return all
}

// visitTo is a request of a client.
type visitTo struct{ path, client string }

func pipeline(address, config string, requests []visitTo, statuses map[int]int) error {
	conn, answers, err := connectTo(address, config)
	if err != nil {
		return err
	}
	defer conn.Close()
	for some := range slices.Chunk(requests, 50) {
		var text strings.Builder
		for _, r := range some {
			fmt.Fprintf(&text, "GET %s HTTP/1.1\r\nHost: %s\r\nX-Forwarded-For: %s\r\n\r\n", r.path, address, r.client)
		}
		if _, err := io.WriteString(conn, text.String()); err != nil {
			return err
		}
		for range some {
			status, _, err := readAnswer(answers)
			if err != nil {
				return err
			}
			statuses[status]++
		}
	}
	return nil
}

// connectTo opens a connection to the configuration of a name. What it asks meets no limit.
func connectTo(address, config string) (conn net.Conn, answers *bufio.Reader, err error) {
	for range 1000 {
		if conn, err = net.Dial("tcp", address); err != nil {
			return nil, nil, err
		}
		answers = bufio.NewReader(conn)
		if _, err = fmt.Fprintf(conn, "GET /free HTTP/1.1\r\nHost: %s\r\n\r\n", address); err == nil {
			var served string
			if _, served, err = readAnswer(answers); err == nil && served == config {
				return conn, answers, nil
			}
		}
		conn.Close()
	}
	return nil, nil, fmt.Errorf("configuration %s is not served", config)
}

// readAnswer reads an answer to its end, and returns its status and the name of the configuration that gave it.
func readAnswer(answers *bufio.Reader) (status int, config string, err error) {
	answer, err := http.ReadResponse(answers, nil)
	if err != nil {
		return 0, "", err
	}
	defer answer.Body.Close()
	_, err = io.Copy(io.Discard, answer.Body)
	return answer.StatusCode, answer.Header.Get("Config"), err
}

// clientsFrom returns what so many clients do, from the first on: each asks once, the tenth part of them twice and the hundredth
// part ten times, which blocks them; some ask for what needs no limit, what needs a key, and what is only tried.
func clientsFrom(first, count int) (all []visitTo) {
	for i := first; i < first+count; i++ {
		client := fmt.Sprintf("10.%d.%d.%d", i>>16&255, i>>8&255, i&255)
		visits := 1
		switch {
		case i%100 == 0:
			visits = 10
		case i%10 == 0:
			visits = 2
		}
		for range visits {
			all = append(all, visitTo{"/", client})
		}
		switch i % 50 {
		case 1:
			all = append(all, visitTo{"/health", client})
		case 2:
			all = append(all, visitTo{"/named", client})
		case 3, 4:
			all = append(all, visitTo{"/tried", client}, visitTo{"/tried", client})
		}
	}
	return all
}
