package ratelimit

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// markedBackend returns the address of one that answers with the values of X-Dry-Run that reach it, and with what is like it.
func markedBackend(t *testing.T, answer func(*http.Request)) string {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if answer != nil {
			answer(r)
		}
		for name, values := range r.Header {
			if sameHeader(name, "X-Dry-Run") {
				fmt.Fprintf(w, "%s: %s", name, strings.Join(values, " and "))
			}
		}
	}))
	t.Cleanup(server.Close)
	return server.Listener.Addr().String()
}

// raw sends a request as it is written, and returns the body of the answer.
func (s *testServer) raw(path string, headers ...string) string {
	s.t.Helper()
	conn, err := net.Dial("tcp", s.addr)
	if err != nil {
		s.t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n", path, strings.Join(append(headers, ""), "\r\n"))
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		s.t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return string(body)
}

// The backend hears what a dry run would have refused, from us and from nobody else.
func TestDryRunHeader(t *testing.T) {
	inFlight := make(chan struct{})
	addr := markedBackend(t, func(r *http.Request) {
		if r.URL.Path == "/slow" {
			inFlight <- struct{}{}
			<-inFlight
		}
	})
	s := serve(t, fmt.Sprintf(`:8080 {
	route {
		rate_limit {
			dry_run_header x-dry-run
			dry_run
			exempt /health
			shed 1
			zone api {
				match /api
				rate 1/h
			}
			zone all {
				match /api
				rate 2/h
			}
		}
		rate_limit {
			dry_run_header X-Dry-Run
			zone inner {
				match /api
				rate 1/h
				dry_run
			}
			zone real {
				match /api
				rate 4/h
			}
		}
		reverse_proxy %s
	}
	handle_errors {
		reverse_proxy %s
	}
}`, addr, addr))
	forged := []string{"X-Dry-Run: forged", "x-dry-run: again", "Connection: keep-alive, X-Dry-Run"}
	for _, row := range []struct {
		path, want, why string
		headers         []string
	}{
		{"/health", "", "exempt, but nobody may write there", forged},
		{"/other", "", "in no zone", forged},
		{"/api", "", "the first is allowed", forged},
		{"/api", `X-Dry-Run: limited;zone="api", limited;zone="inner"`, "the second would be refused by both", forged},
		{"/api", `X-Dry-Run: limited;zone="api", limited;zone="inner"`, "the third by two of the first, of which one makes it wait longer", nil},
		{"/api", `X-Dry-Run: limited;zone="api", limited;zone="inner"`, "the last that really is allowed", nil},
	} {
		if got := s.raw(row.path, row.headers...); got != row.want {
			t.Errorf("%s (%s): the backend got %q, want %q", row.path, row.why, got, row.want)
		}
	}

	done := make(chan struct{})
	go func() { defer close(done); s.raw("/slow") }()
	<-inFlight
	if got := s.raw("/other"); got != "X-Dry-Run: overloaded" {
		t.Errorf("without a slot the backend got %q", got)
	}
	inFlight <- struct{}{}
	<-done
}

// What some backends take for our header is the same to us.
func TestMarksHaveOneName(t *testing.T) {
	for name, want := range map[string]bool{"X-Dry-Run": true, "x_dry.run": true, "X-DRY-RUN": true, "X-Dry-Ran": false, "X-Dry-Run-2": false} {
		if sameHeader(name, "X-Dry-Run") != want {
			t.Errorf("%s: %v, want %v", name, !want, want)
		}
	}
	if got := quotedField("a\"b\\c\r\né"); got != `"a\"b\\c????"` {
		t.Errorf("got %s", got)
	}
	for _, name := range []string{"", "X Y", "Host", "te", "X-RateLimit-Limit", strings.Repeat("x", 65)} {
		if err := (&Handler{DryRunHeader: name}).provisionMarks(); (err == nil) != (name == "") {
			t.Errorf("%q: %v", name, err)
		}
	}
}
