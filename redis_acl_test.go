package ratelimit

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// documentedACL returns the words of a user in docs/redis.md, behind its name.
func documentedACL(t *testing.T, language string) []string {
	t.Helper()
	words := strings.Fields(snippets(t, redisDocs, language)[0])
	if len(words) < 5 || words[0] != "user" || words[1] != "tollgate" || words[2] != "on" || words[3] != ">password" {
		t.Fatalf("no user tollgate with a password: %q", words)
	}
	return words[2:]
}

// permitted is a Redis of any kind, and a Caddy that is the documented user there.
type permitted struct {
	masters  []*redistest.Server // that keep something
	watching []*redistest.Server // where else something can be denied
	node     *node.Node
	config   string
	clients  int
}

// startPermitted starts the Caddy. The options are those that lead to the Redis.
func startPermitted(t *testing.T, options string, masters, watching []*redistest.Server) *permitted {
	t.Helper()
	config := site("redis {\n"+options+"\n username tollgate\n password password\n timeout 1s\n sensitive_timeout 1s\n}\nnodes auto 1\nkey_secret s",
		"penalty {\n after 0\n base 1s\n max 2s\n}\nzone api {\n key {header.X-Key}\n rate 1/h\n burst 1\n}")
	p := &permitted{masters: masters, watching: watching, node: node.Start(t, config), config: config}
	proc.Eventually(t, "Redis is up", func() bool { return p.node.LogLines("redis is up") >= len(masters) })
	return p
}

// everywhere sends a command to all servers.
func (p *permitted) everywhere(command ...any) {
	for _, s := range slices.Concat(p.masters, p.watching) {
		s.Do(command...)
	}
}

// setUser sets the rights of the user, from nothing.
func setUser(servers []*redistest.Server, words []string) {
	command := []any{"acl", "setuser", "tollgate", "reset"}
	for _, word := range words {
		command = append(command, word)
	}
	for _, s := range servers {
		s.Do(command...)
	}
}

// use does everything for which Tollgate asks Redis, with new connections, and returns what was denied.
func (p *permitted) use(t *testing.T) (denied []string) {
	t.Helper()
	p.everywhere("acl", "log", "reset")
	p.forgetScripts()
	p.everywhere("client", "kill", "user", "tollgate")
	p.spoil(func(key string) bool { return key == "tollgate:nodes" })
	if err := p.node.Load(p.config); err != nil { // announces the node
		t.Fatal(err)
	}
	for range 3 {
		p.clients++
		key := fmt.Sprint("client", p.clients)
		ask := func() { _, _ = p.node.Try("GET", "/", "", "X-Key: "+key) }
		for range 3 {
			ask()
		}
		p.spoil(func(found string) bool {
			return strings.HasPrefix(found, "tollgate:{") && !strings.Contains(found, "probe") || found == "tollgate:blocks" && p.clients%3 == 2
		})
		ask()
		ask()
		p.forgetScripts()
		_ = p.node.Admin("GET", "/rate_limit/blocks", "")
		_ = p.node.Admin("POST", "/rate_limit/unblock", fmt.Sprintf(`{"zone":"api","key":%q}`, key))
		_ = p.node.Admin("GET", "/rate_limit/nodes", "")
		for _, path := range []string{"/rate_limit/inspect", "/rate_limit/reset"} {
			_ = p.node.Admin("POST", path, fmt.Sprintf(`{"zone":"api","key":%q}`, key))
		}
	}
	return p.denied()
}

// spoil writes under our names, as another program might.
func (p *permitted) spoil(which func(key string) bool) {
	for _, s := range p.masters {
		for _, key := range s.Keys() {
			if which(key) {
				s.Do("set", key, "x", "px", 5000)
			}
		}
	}
}

func (p *permitted) forgetScripts() {
	for _, s := range p.masters {
		s.Do("script", "flush")
	}
}

func (p *permitted) denied() (what []string) {
	for _, s := range slices.Concat(p.masters, p.watching) {
		what = append(what, deniedBy(s)...)
	}
	return what
}

// deniedBy returns the commands, keys and channels that a server has refused.
func deniedBy(s *redistest.Server) (what []string) {
	entries, _ := s.Do("acl", "log").([]any)
	for _, entry := range entries {
		fields, _ := entry.([]any)
		for i := 0; i+1 < len(fields); i += 2 {
			if fields[i] == "object" {
				what = append(what, strings.ToLower(fmt.Sprint(fields[i+1])))
			}
		}
	}
	return what
}

// suffices makes sure that nothing is denied.
func (p *permitted) suffices(t *testing.T) {
	t.Helper()
	if denied := p.use(t); len(denied) > 0 {
		t.Fatalf("denied: %s", denied)
	}
	if !slices.ContainsFunc(p.masters, func(s *redistest.Server) bool { return slices.Contains(s.Keys(), "tollgate:nodes") }) {
		t.Error("no node was announced")
	}
}

// needs makes sure that every word of an ACL behind the password is needed on the servers: without it, something is denied.
// Some things happen only once in a while, so there is a pause in which to wait for them.
func (p *permitted) needs(t *testing.T, servers []*redistest.Server, acl []string, pause time.Duration) {
	t.Helper()
	for i := 2; i < len(acl); i++ {
		word := acl[i]
		if word == "resetchannels" { // the default since Redis 7
			continue
		}
		missed := func() bool {
			denied := p.denied()
			if word[0] == '+' {
				return slices.Contains(denied, word[1:])
			}
			return len(denied) > 0
		}
		setUser(servers, slices.Delete(slices.Clone(acl), i, i+1))
		proc.Eventually(t, word+" is missed", func() bool {
			p.use(t)
			for until := time.Now().Add(pause); !missed() && time.Now().Before(until); {
				time.Sleep(50 * time.Millisecond)
			}
			return missed()
		})
		setUser(servers, acl)
	}
}

// The permissions in the docs suffice for everything, and every one of them is needed.
func TestDocumentedPermissions(t *testing.T) {
	acl := documentedACL(t, "acl")
	servers := []*redistest.Server{redistest.Start(t)}
	setUser(servers, acl)
	p := startPermitted(t, "address "+servers[0].Addr(), servers, nil)
	p.suffices(t)
	p.needs(t, servers, acl, 0)
}

// Another database than the first one needs one command more, which the docs name.
func TestDocumentedPermissionsForADatabase(t *testing.T) {
	acl := documentedACL(t, "acl")
	servers := []*redistest.Server{redistest.Start(t)}
	setUser(servers, acl)
	node := peers(t, 1, redisSettings{
		network: "tcp", addresses: servers[0].Addr(), prefix: "tollgate", username: "tollgate", password: "password", db: 3,
		timeout: time.Second, patience: time.Second,
	})[0]
	c := testCharge("api", 1e6)
	if d := node.Decide(context.Background(), []Charge{c}); d.Source == SourceRedis {
		t.Errorf("without the right to select a database: %+v", d)
	}
	if denied := deniedBy(servers[0]); !slices.Contains(denied, "select") {
		t.Errorf("denied: %s", denied)
	}
	if !strings.Contains(redisDoc(t), "`+select`") {
		t.Error("the docs do not name it")
	}
	setUser(servers, append(acl, "+select"))
	proc.Eventually(t, "Redis decides", func() bool { return node.Decide(context.Background(), []Charge{c}).Source == SourceRedis })
}
