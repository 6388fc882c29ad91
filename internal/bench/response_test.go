package bench

import (
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"testing/iotest"
)

const (
	okAnswer   = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nServer: Caddy\r\n\r\nhello"
	noAnswer   = "HTTP/1.1 429 Too Many Requests\r\nserver: x\r\ncontent-length: 0\r\n\r\n"
	nothing    = "HTTP/1.1 204 No Content\r\nServer: x\r\n\r\n"
	longAnswer = "HTTP/1.1 503 x\r\nContent-Length:40000\r\n\r\n"
)

// Answers are found wherever the network cuts what it carries.
func TestResponses(t *testing.T) {
	stream := okAnswer + noAnswer + longAnswer + strings.Repeat("\r\n\r\n", 10_000) + nothing + okAnswer
	for name, cut := range map[string]func(io.Reader) io.Reader{
		"at once": func(r io.Reader) io.Reader { return r }, "byte by byte": iotest.OneByteReader, "in halves": iotest.HalfReader, "the end with the last bytes": iotest.DataErrReader,
	} {
		r := &responses{from: cut(strings.NewReader(stream))}
		for _, want := range []int{200, 429, 503, 204, 200} {
			if got, err := r.next(); got != want || err != nil {
				t.Fatalf("%s: got %d, %v, want %d", name, got, err, want)
			}
		}
		if _, err := r.next(); !errors.Is(err, io.EOF) {
			t.Errorf("%s: got %v, want the end", name, err)
		}
	}
}

func TestResponsesThatAreWrong(t *testing.T) {
	for _, answer := range []string{
		"",
		"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhell",
		"HTTP/1.1 200 OK\r\nContent-Le",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"HTTP/1.1 204 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"HTTP/1.1 200 OK\r\nX-Content-Length: 0\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
		"HTTP/1.1 OK OK\r\nContent-Length: 0\r\n\r\n",
		"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
		"HTTP/1.1\r\n\r\n",
		"HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 20_000) + "\r\n\r\n",
	} {
		if status, err := (&responses{from: strings.NewReader(answer)}).next(); err == nil {
			t.Errorf("%.60q: got %d and no error", answer, status)
		}
	}
}

// The clients share the processors with what they measure: they allocate nothing for a request.
func TestClientsDoNotAllocate(t *testing.T) {
	here, there := net.Pipe()
	defer here.Close()
	go func() {
		buf := make([]byte, 4096)
		for {
			if _, err := there.Read(buf); err != nil {
				return
			}
			if _, err := there.Write([]byte(okAnswer)); err != nil {
				return
			}
		}
	}()
	c := newClient(here, &site{addr: "a", path: "/", status: 200})
	c.keys = 10
	if got := testing.AllocsPerRun(100, func() {
		if status, err := c.exchange(); status != 200 || err != nil {
			t.Fatalf("got %d, %v", status, err)
		}
	}); got > 1 { // one is the answer of this test
		t.Errorf("%v allocations a request", got)
	}
}
