package ratelimit

import (
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// Who shares connections to Redis, and how they are replaced.

// rotation is a Caddy whose secrets change while clients use a sensitive route.
type rotation struct {
	t      *testing.T
	server *redistest.Server
	node   *node.Node
	// ours says whether a line of CLIENT LIST is a connection of the Caddy's.
	ours func(client string) bool
}

// rotate makes the node load a configuration with other secrets, and waits until every connection is newer than that.
func (r *rotation) rotate(config string) {
	r.t.Helper()
	newest := 0
	for _, id := range clientIDs(r.server, func(string) bool { return true }) {
		n, _ := strconv.Atoi(id)
		newest = max(newest, n)
	}
	if err := r.node.Load(config); err != nil {
		r.t.Fatal(err)
	}
	proc.Eventually(r.t, "the old connections are closed", func() bool {
		ids := clientIDs(r.server, r.ours)
		return len(ids) >= warmConns && !slices.ContainsFunc(ids, func(id string) bool { n, _ := strconv.Atoi(id); return n <= newest })
	})
	if ids := clientIDs(r.server, r.ours); len(ids) > defaultPoolSize {
		r.t.Errorf("%d connections are more than one pool", len(ids))
	}
}

// whileAsked does work while clients ask, each of whom must be admitted.
func (r *rotation) whileAsked(work func()) {
	r.t.Helper()
	statuses, stop := ask(r.t, r.node, 8)
	defer stop()
	proc.Eventually(r.t, "clients are answered", func() bool { return statuses()[http.StatusOK] > 100 })
	work()
	asked := statuses()[http.StatusOK]
	proc.Eventually(r.t, "clients are answered", func() bool { return statuses()[http.StatusOK] > asked+100 })
	stop()
	seen := statuses()
	r.t.Logf("statuses %v", seen)
	if len(seen) != 1 {
		r.t.Errorf("statuses %v, want 200 only", seen)
	}
	if down := r.node.LogLines("redis is down") + r.node.LogLines("redis cannot be reached"); down > 0 {
		r.t.Errorf("%d outages", down)
	}
}

// ask has so many clients ask until stopped, and returns how often they got which status.
func ask(t *testing.T, n *node.Node, clients int) (statuses func() map[int]int, stop func()) {
	var done atomic.Bool
	var mu sync.Mutex
	var asking sync.WaitGroup
	seen := map[int]int{}
	for range clients {
		asking.Go(func() {
			for !done.Load() {
				answer, err := n.Try(http.MethodGet, "/", "")
				if err != nil { // a connection that Caddy had closed, see admittedIn
					continue
				}
				mu.Lock()
				seen[answer.Status]++
				mu.Unlock()
			}
		})
	}
	return func() map[int]int {
		mu.Lock()
		defer mu.Unlock()
		return maps.Clone(seen)
	}, func() { done.Store(true); asking.Wait() }
}

// A password is changed as Redis users do it: the new one is valid beside the old one, the configuration is loaded again, the old
// one is taken away. Nobody is refused meanwhile, and what was open with the old one is closed.
func TestPasswordRotation(t *testing.T) {
	server := redistest.Start(t)
	secret := filepath.Join(t.TempDir(), "password")
	config := func(password string) string {
		return site("redis {$REDIS} {\n username gate\n password "+password+"\n timeout 1s\n sensitive_timeout 5s\n}\nkey_secret test\nnodes 1",
			"zone login {\n rate 1000000/s\n sensitive\n}")
	}
	// Connections that are kept ready and were not used yet have not logged in; those of assertions have.
	server.Do("acl", "setuser", "gate", "on", "~*", "+@all", ">one")
	r := &rotation{
		t: t, server: server, ours: func(client string) bool { return !strings.Contains(client, " cmd=client|list ") },
		node: node.Start(t, config("{env.OLD}"), node.Env("REDIS", server.Addr()), node.Env("OLD", "one"), node.Env("NEW", "two")),
	}
	r.whileAsked(func() {
		valid := "one"
		for _, next := range []struct{ password, config string }{
			{"two", config("{env.NEW}")},
			{"three", config("{file." + secret + "}")},
			{"four", config("{file." + secret + "}")}, // the same configuration, another content of the file
		} {
			server.Do("acl", "setuser", "gate", ">"+next.password)
			if err := os.WriteFile(secret, []byte(next.password), 0o600); err != nil {
				t.Fatal(err)
			}
			r.rotate(next.config)
			server.Do("acl", "setuser", "gate", "<"+valid)
			valid = next.password
		}
	})
	if refused, _ := server.Do("acl", "log").([]any); len(refused) > 0 {
		t.Errorf("Redis refused a password: %v", refused)
	}
	if lines := r.node.LogLines(`"rate_limit.redis"`); lines != 4 {
		t.Errorf("%d log lines about Redis, want that each of four pools is up", lines)
	}
}

// The same with the certificate that a client shows: the same paths, other files.
func TestCertificateRotation(t *testing.T) {
	server := redistest.StartTLS(t, "--tls-auth-clients", "yes")
	folder := t.TempDir()
	put := func(cert, key redistest.PEM) {
		for name, content := range map[string]redistest.PEM{"crt": cert, "key": key} {
			if err := os.WriteFile(filepath.Join(folder, name), []byte(content.Text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	put(server.ClientCert, server.ClientKey)
	config := site(fmt.Sprintf("redis {$REDIS} {\n tls_server_certs_path %s\n tls_client_cert_path %s/crt\n tls_client_key_path %s/key\n timeout 1s\n sensitive_timeout 5s\n}\nkey_secret test\nnodes 1",
		server.CA.Path, folder, folder), "zone login {\n rate 1000000/s\n sensitive\n}")
	r := &rotation{
		t: t, server: server.Server, ours: func(client string) bool { return strings.Contains(client, " laddr="+server.TLSAddr()+" ") },
		node: node.Start(t, config, node.Env("REDIS", server.TLSURL())),
	}
	r.whileAsked(func() {
		put(server.ServerCert, server.ServerKey) // another one by the same CA
		r.rotate(config)
		put(server.ClientCert, server.ClientKey)
		r.rotate(config)
	})
}

// Whoever differs in a secret, in what proves who Redis is, or in the database has connections of his own; where the same comes
// from does not matter.
func TestPoolsBySettings(t *testing.T) {
	keys, others := newTestKeys(t), newTestKeys(t)
	t.Setenv("TOLLGATE_TEST_SECRET", "secret")
	quoted := func(text string) string { return strconv.Quote(text) }
	mutual := func(k *testKeys) string {
		return `"tls_client_cert_pem":` + quoted(k.cert) + `,"tls_client_key_pem":` + quoted(k.key)
	}
	configs := []string{
		`"address":["redis://:secret@a:1"]`,
		`"address":["redis://:secre@a:1"]`,
		`"address":["redis://bob:secret@a:1"]`,
		`"address":["redis://:secret@a:1/2"]`,
		`"address":["rediss://:secret@a:1"]`,
		`"address":["rediss://:secret@a:1"],"tls_insecure":true`,
		`"address":["rediss://:secret@a:1"],"tls_server_name":"b"`,
		`"address":["rediss://:secret@a:1"],"tls_server_certs_pem":` + quoted(keys.ca),
		`"address":["rediss://:secret@a:1"],"tls_server_certs_pem":` + quoted(others.ca),
		`"address":["rediss://:secret@a:1"],` + mutual(keys),
		`"address":["rediss://:secret@a:1"],` + mutual(others),
		`"address":["a:1"],"master_name":"m","password":"secret"`,
		`"address":["a:1"],"master_name":"m","password":"secret","sentinel_password":"secret"`,
		`"address":["a:1"],"master_name":"m","password":"secret","sentinel_password":"secret","sentinel_username":"bob"`,
	}
	clientOf := func(config string) *redisClient {
		s, err := readRedis(t, "{"+config).settings()
		if err != nil {
			t.Fatalf("%s: %v", config, err)
		}
		client, err := acquireRedis(s)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { releaseRedis(client) })
		return client
	}
	known := map[*redisClient]string{}
	for _, config := range configs {
		client := clientOf(config)
		if other, shared := known[client]; shared {
			t.Errorf("one pool for\n%s\n%s", config, other)
		}
		known[client] = config
	}
	for same, config := range map[string]string{
		`"address":["a:1"],"password":"{env.TOLLGATE_TEST_SECRET}"`:                                                                      configs[0],
		`"address":["redis://bob@a:1"],"password":"secret"`:                                                                              configs[2],
		`"address":["a:1"],"password":"secret","tls_enabled":true,"tls_server_certs_path":"` + keys.file("ca") + `"`:                     configs[7],
		`"address":["rediss://:secret@a:1"],"tls_client_cert_path":"` + keys.file("cert") + `","tls_client_key_pem":` + quoted(keys.key): configs[9],
	} {
		if known[clientOf(same)] != config {
			t.Errorf("two pools for\n%s\n%s", same, config)
		}
	}
}

// Two zones in two databases, by two users, in one process: no connection serves the other.
func TestDatabasesAreApart(t *testing.T) {
	server := redistest.Start(t)
	server.Do("acl", "setuser", "three", "on", "~*", "+@all", ">secret3")
	server.Do("acl", "setuser", "five", "on", "~*", "+@all", ">secret5")
	limits := func(path, user string, db int) string {
		return fmt.Sprintf(`handle /%s {
			rate_limit {
				redis {$REDIS} {
					username %s
					password {env.SECRET%d}
					db %d
					timeout 5s
					sensitive_timeout 5s
				}
				nodes 1
				zone %s {
					rate 1/h
					burst 1000
				}
			}
			respond ok
		}
		`, path, user, db, db, path)
	}
	n := node.Start(t, "{\n admin {$ADMIN}\n}\nhttp://:{$PORT} {\n"+limits("a", "three", 3)+limits("b", "five", 5)+"}",
		node.Env("REDIS", server.Addr()), node.Env("SECRET3", "secret3"), node.Env("SECRET5", "secret5"))
	const requests = 50
	var clients sync.WaitGroup
	for _, path := range []string{"/a", "/b"} {
		for range 4 {
			clients.Go(func() {
				for range requests {
					if answer, err := n.Try(http.MethodGet, path, ""); err != nil || answer.Status != http.StatusOK {
						t.Errorf("%s: got %+v, %v", path, answer, err)
						return
					}
				}
			})
		}
	}
	clients.Wait()
	for _, path := range []string{"/a", "/b"} {
		if left := n.Get(path).Header.Get("X-RateLimit-Remaining"); left != strconv.Itoa(1000-4*requests-1) {
			t.Errorf("%s: %s left", path, left)
		}
	}
	for db, zone := range map[int]string{0: "", 3: "za", 5: "zb"} {
		// A script can look into another database without that the connection stays there.
		fields, _ := server.Do("eval", `redis.call('select', ARGV[1])
			local fields = {}
			for _, key in ipairs(redis.call('keys', '*')) do
				if string.sub(key, -1) == '}' then
					for _, field in ipairs(redis.call('hkeys', key)) do fields[#fields + 1] = field end
				end
			end
			return table.concat(fields, ' ')`, 0, db).(string)
		if fields != zone {
			t.Errorf("database %d has %q, want %q", db, fields, zone)
		}
	}
}
