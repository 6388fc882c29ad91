package ratelimit

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// documentedACL returns the words of a user in docs/redis.md, behind its name.
func documentedACL(t *testing.T, language string) []string {
	t.Helper()
	words := strings.Fields(snippets(t, "docs/redis.md", language)[0])
	if len(words) < 3 || words[0] != "user" || words[1] != "tollgate" {
		t.Fatalf("no user tollgate: %q", words)
	}
	return words[2:]
}

// commandsOf returns what an ACL permits.
func commandsOf(acl []string) (commands []string) {
	for _, word := range acl {
		if strings.HasPrefix(word, "+") {
			commands = append(commands, word[1:])
		}
	}
	return commands
}

// permitted is a Redis with the documented user, and a Caddy that is that user.
type permitted struct {
	server  *redistest.Server
	node    *node.Node
	config  string
	clients int
}

// use does everything for which Tollgate asks Redis, with new connections, and returns what was denied.
func (p *permitted) use(t *testing.T) (denied []string) {
	t.Helper()
	s, n := p.server, p.node
	s.Do("acl", "log", "reset")
	s.Do("script", "flush")
	s.Do("client", "kill", "user", "tollgate")
	s.Do("set", "tollgate:nodes", "no list")
	if err := n.Load(p.config); err != nil { // announces the node
		t.Fatal(err)
	}
	ask := func(key string) { _, _ = n.Try("GET", "/", "", "X-Key: "+key) }
	for range 3 {
		p.clients++
		key := fmt.Sprint("client", p.clients)
		for range 3 {
			ask(key)
		}
		for _, found := range s.Keys() { // another program writes under our names
			if strings.HasPrefix(found, "tollgate:{") && !strings.Contains(found, "probe") || found == "tollgate:blocks" && p.clients%3 == 2 {
				s.Do("set", found, "x", "px", 5000)
			}
		}
		ask(key)
		ask(key)
		s.Do("script", "flush")
		_ = n.Admin("GET", "/rate_limit/blocks", "")
		_ = n.Admin("POST", "/rate_limit/unblock", fmt.Sprintf(`{"zone":"api","key":%q}`, key))
		_ = n.Admin("GET", "/rate_limit/nodes", "")
	}
	return deniedBy(s)
}

// deniedBy returns the commands that a server has refused.
func deniedBy(s *redistest.Server) (commands []string) {
	entries, _ := s.Do("acl", "log").([]any)
	for _, entry := range entries {
		fields, _ := entry.([]any)
		for i := 0; i+1 < len(fields); i += 2 {
			if fields[i] == "object" {
				commands = append(commands, strings.ToLower(fmt.Sprint(fields[i+1])))
			}
		}
	}
	return commands
}

// The permissions in the docs suffice for everything, and every one of them is needed.
func TestDocumentedPermissions(t *testing.T) {
	acl := documentedACL(t, "acl")
	server := redistest.Start(t, append([]string{"--user", "tollgate"}, acl...)...)
	config := site("redis {$REDIS} {\n username tollgate\n password password\n timeout 1s\n sensitive_timeout 1s\n}\nnodes auto 1\nkey_secret s",
		"penalty {\n after 0\n base 1s\n max 2s\n}\nzone api {\n key {header.X-Key}\n rate 1/h\n burst 1\n}")
	p := &permitted{server: server, node: node.Start(t, config, node.Env("REDIS", server.Addr())), config: config}
	proc.Eventually(t, "Redis is up", func() bool { return p.node.LogLines("redis is up") > 0 })
	if denied := p.use(t); len(denied) > 0 {
		t.Fatalf("denied: %s", denied)
	}
	if !slices.Contains(server.Keys(), "tollgate:nodes") {
		t.Error("no node was announced")
	}
	for _, command := range commandsOf(acl) {
		server.Do("acl", "setuser", "tollgate", "-"+command)
		proc.Eventually(t, command+" is missed", func() bool { return slices.Contains(p.use(t), command) })
		server.Do("acl", "setuser", "tollgate", "+"+command)
	}
}
