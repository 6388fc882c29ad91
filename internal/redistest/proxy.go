package redistest

import (
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/proc"
)

// Proxy is a TCP proxy in front of a server. It makes the network's failures: replies that come late or never,
// connections that break, a port where nobody listens. What Redis itself does wrong is made by Server.
//
// It passes any bytes, also TLS; only Requests needs to understand them.
type Proxy struct {
	t    testing.TB
	addr string

	delay, connectDelay atomic.Int64
	drop                atomic.Bool
	dropTo              atomic.Pointer[string] // the command whose connections get no replies, in lower case
	target              atomic.Pointer[string]

	accepted, requests, toServer, toClient atomic.Int64

	mu        sync.Mutex
	listener  net.Listener // nil while new connections are refused
	links     map[*link]struct{}
	accepting sync.WaitGroup
	running   sync.WaitGroup
}

// link is one client's connection and what belongs to it on the other side.
type link struct {
	client, server net.Conn
	opens          time.Time   // nothing passes before
	mute           atomic.Bool // no reply passes any more
	once           sync.Once
	cut            chan struct{}
}

func (l *link) close() {
	l.once.Do(func() {
		close(l.cut)
		l.client.Close()
		l.server.Close()
	})
}

// NewProxy starts a proxy to the target, host and port, on a free port. It ends with the test.
func NewProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	p := &Proxy{
		t: t, links: make(map[*link]struct{}),
		addr: net.JoinHostPort("127.0.0.1", strconv.Itoa(proc.Port(t))),
	}
	p.SetTarget(target)
	t.Cleanup(p.end)
	p.Refuse(false)
	return p
}

func (p *Proxy) end() {
	p.Refuse(true)
	p.accepting.Wait() // or a connection that is just being accepted is not cut
	p.Cut()
	p.running.Wait()
}

// Addr returns host and port of the proxy.
func (p *Proxy) Addr() string { return p.addr }

// URL returns the address of the proxy as a redis:// URL without a password.
func (p *Proxy) URL() string { return redisURL("redis", "", p.addr) }

// SetTarget sends new connections to another server, as a name or a virtual address does that has moved. Connections that
// exist stay where they are.
func (p *Proxy) SetTarget(target string) { p.target.Store(&target) }

// SetDelay delays everything by d, in each direction. Like distance it takes no bandwidth: what comes meanwhile is
// on its way too. Connections open at once. What is on its way already keeps its delay.
func (p *Proxy) SetDelay(d time.Duration) { p.delay.Store(int64(d)) }

// SetConnectDelay makes new connections slow to open and fast afterwards: they are accepted at once, but nothing passes
// in either direction until d later. To a client that speaks TLS or logs in that is a slow connect.
func (p *Proxy) SetConnectDelay(d time.Duration) { p.connectDelay.Store(int64(d)) }

// DropReplies makes what the server sends disappear. Requests still reach it and are executed. Connections stay open;
// to lose a reply by a broken connection, Cut them once the server has executed the request.
func (p *Proxy) DropReplies(drop bool) { p.drop.Store(drop) }

// DropRepliesTo makes replies disappear as DropReplies does, but only on connections that send the command from now on,
// like "evalsha", and on these all replies from then on, also after DropRepliesTo(""), which spares those that send it
// later. Sentinels and replicas that come through the same proxy keep their connections, so nothing fails over. It needs
// to read what clients send, so it does nothing to TLS.
func (p *Proxy) DropRepliesTo(command string) {
	command = strings.ToLower(command)
	p.dropTo.Store(&command)
}

// Cut breaks all connections, with everything that is on its way.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		l.close()
	}
}

// Refuse makes the proxy's port closed to new connections, or open again. Connections that exist stay.
func (p *Proxy) Refuse(refuse bool) {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if refuse == (p.listener == nil) {
		return
	}
	if refuse {
		p.listener.Close()
		p.listener = nil
		return
	}
	listener, err := net.Listen("tcp", p.addr)
	if err != nil {
		p.t.Fatalf("proxy: %v", err)
	}
	p.listener = listener
	p.accepting.Go(func() { p.accept(listener) })
}

// Conns returns how many connections were accepted so far.
func (p *Proxy) Conns() int { return int(p.accepted.Load()) }

// OpenConns returns how many connections are open now.
func (p *Proxy) OpenConns() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.links)
}

// Requests returns how many Redis commands came from clients so far, complete ones, those in transactions and
// pipelines each for itself.
func (p *Proxy) Requests() int { return int(p.requests.Load()) }

// Bytes returns how many bytes came from clients and from the server so far, dropped ones included.
func (p *Proxy) Bytes() (toServer, toClient int64) { return p.toServer.Load(), p.toClient.Load() }

func (p *Proxy) accept(listener net.Listener) {
	for {
		client, err := listener.Accept()
		if err != nil {
			return // closed
		}
		p.accepted.Add(1)
		server, err := net.Dial("tcp", *p.target.Load())
		if err != nil {
			client.Close() // the nearest to a refusal that is left
			continue
		}
		l := &link{client: client, server: server, cut: make(chan struct{})}
		l.opens = time.Now().Add(time.Duration(p.connectDelay.Load()))
		p.mu.Lock()
		p.links[l] = struct{}{}
		p.mu.Unlock()
		p.running.Go(func() { p.serve(l) })
	}
}

func (p *Proxy) serve(l *link) {
	var commands commandCounter
	var pumps sync.WaitGroup
	pumps.Go(func() {
		p.pump(l, l.server, l.client, func(chunk []byte) bool {
			p.toServer.Add(int64(len(chunk)))
			names := commands.feed(chunk)
			p.requests.Add(int64(len(names)))
			if to := p.dropTo.Load(); to != nil && slices.Contains(names, *to) {
				l.mute.Store(true) // the request is not passed on yet, so its reply has not come
			}
			return true
		})
	})
	pumps.Go(func() {
		p.pump(l, l.client, l.server, func(chunk []byte) bool {
			p.toClient.Add(int64(len(chunk)))
			return !p.drop.Load() && !l.mute.Load()
		})
	})
	pumps.Wait()
	p.mu.Lock()
	delete(p.links, l)
	p.mu.Unlock()
}

// parcel is what was read at once, and when it is to arrive.
type parcel struct {
	data []byte
	due  time.Time
}

// pump carries bytes from one side to the other until either is closed, then closes both. Pass is asked about all that
// was read, whether it goes on.
func (p *Proxy) pump(l *link, to, from net.Conn, pass func([]byte) bool) {
	way := make(chan parcel, 4096)
	var delivery sync.WaitGroup
	delivery.Go(func() { deliver(l, to, way) })
	room := make([]byte, 32<<10)
	for {
		n, err := from.Read(room)
		if n > 0 && pass(room[:n]) {
			due := time.Now().Add(time.Duration(p.delay.Load()))
			if due.Before(l.opens) {
				due = l.opens
			}
			way <- parcel{slices.Clone(room[:n]), due}
		}
		if err != nil {
			break
		}
	}
	close(way)
	delivery.Wait()
	l.close()
}

// deliver hands over each parcel when it is due. Once one cannot be, the rest is thrown away.
func deliver(l *link, to net.Conn, way <-chan parcel) {
	bell, err := newAlarm()
	if err != nil {
		l.close()
	} else {
		defer bell.close()
	}
	for next := range way {
		if !l.wait(bell, next.due) {
			continue
		}
		if _, err := to.Write(next.data); err != nil {
			l.close()
		}
	}
}

// late is how much too late a timer of Go may come.
const late = 2 * time.Millisecond

// wait waits until it is time, and says whether the link is still there then.
func (l *link) wait(bell *alarm, due time.Time) bool {
	if early := time.Until(due) - late; early > 0 {
		select {
		case <-l.cut:
			return false
		case <-time.After(early):
		}
	}
	return bell.wait(time.Until(due)) == nil
}
