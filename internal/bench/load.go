package bench

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// load says what is sent: each of the connections sends its next request when the answer to the last one is there.
//
// It runs in goroutines of this process, which shares the processors with what it measures but is not part of it: CPU time is
// read for each server by itself.
type load struct {
	conns int
	// keys is how many values the header X-Key takes, one after the other.
	keys int
	// pace is how many requests are sent each second, over all connections; 0: as many as are answered.
	pace int
}

// sample is what the clients saw in a while.
type sample struct {
	latency  histogram
	requests int64
	elapsed  time.Duration
	// odd counts answers with another status than the one that is expected, and oddStatus is one of them.
	odd       int64
	oddStatus int
}

const (
	warming int32 = iota
	measuring
	done
)

// patience is how long after its end a load waits for answers.
const patience = 15 * time.Second

// site is where requests go, and what is expected.
type site struct {
	addr, path string
	status     int
	// turn is where the sequence of keys goes on in the next round.
	turn int
}

// run warms up and then measures. Mark is called when the measured time begins and when it ends.
func (l load) run(s *site, warm, duration time.Duration, mark func()) (*sample, error) {
	clients, err := l.connect(s, warm+duration)
	if err != nil {
		return nil, err
	}
	var phase atomic.Int32
	var running sync.WaitGroup
	got := new(sample)
	errs := make([]error, len(clients))
	for i, c := range clients {
		running.Go(func() { errs[i] = c.loop(&phase, &got.latency) })
	}
	time.Sleep(warm)
	mark()
	begin := time.Now()
	phase.Store(measuring)
	time.Sleep(duration)
	phase.Store(done)
	got.elapsed = time.Since(begin)
	mark()
	running.Wait()
	got.add(clients, s)
	return got, errors.Join(errs...)
}

func (l load) connect(s *site, life time.Duration) ([]*client, error) {
	clients := make([]*client, l.conns)
	for i := range clients {
		conn, err := net.Dial("tcp", s.addr)
		if err != nil {
			return nil, fmt.Errorf("connecting to the server: %w", err)
		}
		if err := conn.SetDeadline(time.Now().Add(life + patience)); err != nil {
			return nil, err
		}
		c := newClient(conn, s)
		c.keys, c.key = l.keys, (s.turn+i*l.keys/l.conns)%l.keys
		if l.pace > 0 {
			c.interval = time.Second * time.Duration(l.conns) / time.Duration(l.pace)
			c.due = time.Now().Add(c.interval * time.Duration(i) / time.Duration(l.conns))
		}
		clients[i] = c
	}
	return clients, nil
}

func (got *sample) add(clients []*client, s *site) {
	for _, c := range clients {
		got.requests += c.requests
		got.odd += c.odd
		got.oddStatus = max(got.oddStatus, c.oddStatus)
		s.turn += c.sent / len(clients)
	}
}

// client is one connection.
type client struct {
	conn    net.Conn
	answers responses
	request []byte
	digits  []byte // the part of the request that is the key
	want    int

	keys, key int
	interval  time.Duration // between requests; 0: none
	due       time.Time

	sent          int
	requests, odd int64
	oddStatus     int
}

const keyDigits = "0000000"

func newClient(conn net.Conn, s *site) *client {
	head := "GET " + s.path + " HTTP/1.1\r\nHost: " + s.addr + "\r\nX-Key: "
	c := &client{conn: conn, want: s.status, request: []byte(head + keyDigits + "\r\n\r\n")}
	c.digits = c.request[len(head) : len(head)+len(keyDigits)]
	c.answers.from = conn
	return c
}

func (c *client) loop(phase *atomic.Int32, latency *histogram) error {
	defer c.conn.Close()
	for before := time.Now(); ; {
		if c.interval > 0 {
			before = c.pause()
		}
		now := phase.Load()
		if now == done {
			return nil
		}
		status, err := c.exchange()
		if err != nil {
			return err
		}
		after := time.Now()
		if now == measuring {
			latency.record(after.Sub(before))
			c.count(status)
		}
		before = after
	}
}

// pause waits for the time at which the next request is due, and returns when it is sent: time.Sleep comes late by as much as a
// millisecond, which is none of the server's.
func (c *client) pause() time.Time {
	time.Sleep(time.Until(c.due))
	c.due = c.due.Add(c.interval)
	return time.Now()
}

func (c *client) exchange() (status int, err error) {
	c.writeKey()
	if _, err := c.conn.Write(c.request); err != nil {
		return 0, fmt.Errorf("sending a request: %w", err)
	}
	if status, err = c.answers.next(); err != nil {
		return 0, fmt.Errorf("reading an answer: %w", err)
	}
	c.sent++
	return status, nil
}

// writeKey puts the next key into the request.
func (c *client) writeKey() {
	rest := c.key
	for i := len(c.digits) - 1; i >= 0; i-- {
		c.digits[i] = byte('0' + rest%10)
		rest /= 10
	}
	if c.key++; c.key == c.keys {
		c.key = 0
	}
}

func (c *client) count(status int) {
	c.requests++
	if status != c.want {
		c.odd, c.oddStatus = c.odd+1, status
	}
}
