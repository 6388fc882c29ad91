package ratelimit

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
)

func TestRedisSettings(t *testing.T) {
	t.Setenv("TOLLGATE_TEST_ADDRESS", "redis://user:pass@example.com:6380/3")
	t.Setenv("TOLLGATE_TEST_ADDRESSES", "a:1, b:2")
	t.Setenv("TOLLGATE_TEST_EMPTY", "")
	t.Setenv("TOLLGATE_TEST_SECRET", "secret")
	for _, test := range []struct {
		address, more, want, err string
	}{
		{address: "localhost:6379", want: "localhost:6379/0"},
		{address: "[::1]:6379", want: "[::1]:6379/0"},
		{address: "redis://localhost", want: "localhost:6379/0"},
		{address: "redis://[::1]", want: "[::1]:6379/0"},
		{address: "rediss://localhost", want: "localhost:6379/0"},
		{address: "redis://:secret@localhost:7000/5", want: "localhost:7000/5"},
		{address: "unix:///run/redis.sock?db=2", want: "/run/redis.sock/2"},
		{address: "unix://user:secret@/run/redis.sock", want: "/run/redis.sock/0"},
		{address: "{env.TOLLGATE_TEST_ADDRESS}", want: "example.com:6380/3"},
		{address: "a:1", more: `"username":"bob","password":"secret","db":2`, want: "a:1/2"},
		{address: "redis://bob@a:1", more: `"password":"secret"`, want: "a:1/0"},
		{address: "a:1", more: `"cluster":true`, want: "cluster a:1"},
		{address: "redis://a:1/0", more: `"cluster":"on"`, want: "cluster a:1"},
		{address: "{env.TOLLGATE_TEST_ADDRESSES}", more: `"cluster":"true"`, want: "cluster a:1,b:2"},
		{address: "a:1,b:2", more: `"master_name":"main","db":"3"`, want: "main/3 of sentinels a:1,b:2"},
		{address: "a:1", more: `"master_name":"main","cluster":false,"sentinel_password":"secret"`, want: "main/0 of sentinels a:1"},
		{address: "a:1", more: `"timeout":20000000,"sensitive_timeout":"1s"`, want: "a:1/0"},

		{address: "{env.TOLLGATE_TEST_EMPTY}", err: `redis: evaluated placeholder {env.TOLLGATE_TEST_EMPTY} is empty; write redis off to keep buckets in this process`},
		{address: "redis://:secret@{env.TOLLGATE_TEST_EMPTY}:6379", err: `redis: evaluated placeholder {env.TOLLGATE_TEST_EMPTY} is empty; write redis off to keep buckets in this process`},
		{address: "redis://:{secret}@localhost:6379", err: `redis: in braces stands no placeholder that is known when the configuration loads: write {env.NAME}, or {file.…} with the absolute path of a file, and other braces as \{ and \}; write redis off to keep buckets in this process`},
		{address: "", err: "redis: it is empty; write redis off to keep buckets in this process"},
		{address: "localhost", err: `redis: the address has no port: write host:port, or a URL like redis://host:6379/0`},
		{address: "{env.TOLLGATE_TEST_SECRET}", err: `redis: the address has no port: write host:port, or a URL like redis://host:6379/0`},
		{address: "localhost:65536", err: `redis: the address has no port: write host:port, or a URL like redis://host:6379/0`},
		{address: "user:secret@localhost", err: "redis: the address has no port: write host:port, or a URL like redis://host:6379/0"},
		{address: "secret@localhost:6379", err: "redis: the address is more than host:port: write user and password as username and password, or as a URL like redis://user:password@host:6379/0"},
		{address: "http://:secret@localhost:6379", err: `redis: the URL must begin with redis://, rediss:// or unix://`},
		{address: "redis://:sec%ret@localhost", err: "redis: the URL cannot be parsed; write it like redis://user:password@host:6379/0, special characters in the password as %XX"},
		{address: "redis://:12#secret@localhost", err: "redis: the URL cannot be parsed; write it like redis://user:password@host:6379/0, special characters in the password as %XX"},
		{address: "redis://:12?secret@localhost", err: "redis: the URL has parameters; only unix:///run/redis.sock?db=0 has one: write others as options, and a ? in a password as %3F"},
		{address: "redis://:12/secret@localhost", err: "redis: the URL must be like redis://user:password@host:6379/0 or unix:///run/redis.sock?db=0, with the number of a database"},
		{address: "redis://:secret@localhost/zero", err: "redis: the URL must be like redis://user:password@host:6379/0 or unix:///run/redis.sock?db=0, with the number of a database"},
		{address: "redis://:secret@localhost/-1", err: "redis: the URL must be like redis://user:password@host:6379/0 or unix:///run/redis.sock?db=0, with the number of a database"},
		{address: "redis://:secret@localhost:65536", err: "redis: the URL must be like redis://user:password@host:6379/0 or unix:///run/redis.sock?db=0, with the number of a database"},
		{address: "redis://:secret@localhost?read_timeout=6s", err: `redis: the URL has parameters; only unix:///run/redis.sock?db=0 has one: write others as options, and a ? in a password as %3F`},
		{address: "unix://run/redis.sock", err: "redis: the URL must be like redis://user:password@host:6379/0 or unix:///run/redis.sock?db=0, with the number of a database"},
		{address: "{env.TOLLGATE_TEST_ADDRESS}", more: `"cluster":true`, err: `redis: a Redis Cluster has no db but 0: leave it out, and tell environments apart by prefix`},
		{address: "{env.TOLLGATE_TEST_ADDRESS}", more: `"password":"{env.TOLLGATE_TEST_SECRET}"`, err: `redis: password stands in the URL and in the block: write it in one of them`},
		{address: "{env.TOLLGATE_TEST_ADDRESS}", more: `"tls_server_name":"a"`, err: `redis: there are tls_ options, but TLS is off: write tls_enabled or a URL that begins with rediss://, or leave them out`},
		{address: "{env.TOLLGATE_TEST_ADDRESSES}", err: `redis: several addresses are one Redis only with cluster, or with master_name and the addresses of its Sentinels: write one of these`},
		{address: "a:1", more: `"db":"{env.TOLLGATE_TEST_SECRET}"`, err: `redis: db "{env.TOLLGATE_TEST_SECRET}": write a whole number from 0 to 2147483647`},
		{address: "a:1", more: `"db":1.5`, err: `redis: db "1.5": write a whole number from 0 to 2147483647`},
		{address: "a:1", more: `"cluster":"{env.TOLLGATE_TEST_SECRET}"`, err: `redis: cluster "{env.TOLLGATE_TEST_SECRET}": write on, off, true or false`},
		{address: "a:1", more: `"cluster":"yes"`, err: `redis: cluster "yes": write on, off, true or false`},
		{address: "a:1", more: `"timeout":"{env.TOLLGATE_TEST_SECRET}"`, err: `redis: timeout "{env.TOLLGATE_TEST_SECRET}": write a duration above 0 and below 10 years, with its unit, like 50ms, 10s or 1h`},
		{address: "a:1", more: `"timeout":"50"`, err: `redis: timeout "50": write a duration above 0 and below 10 years, with its unit, like 50ms, 10s or 1h`},
		{address: "a:1", more: `"timeout":50`, err: `redis: timeout must be at least 1ms and sensitive_timeout at least timeout, got 50ns and 500ms`},
		{address: "a:1", more: `"timeout":0`, err: `redis: timeout "0s": write a duration above 0 and below 10 years, with its unit, like 50ms, 10s or 1h`},
		{address: "a:1", more: `"password":"{secret}"`, err: `redis: password: in braces stands no placeholder that is known when the configuration loads: write {env.NAME}, or {file.…} with the absolute path of a file, and other braces as \{ and \}`},
		{address: "rediss://a:1", more: `"tls_server_certs_path":"{env.TOLLGATE_TEST_SECRET}"`, err: `redis: tls_server_certs_path: reading the file: no such file or directory`},
	} {
		r := readRedis(t, `{"address":["`+test.address+`"],`+test.more)
		s, err := r.settings()
		switch {
		case test.err == "" && (err != nil || s.String() != test.want):
			t.Errorf("%s %s: got %s, %v, want %s", test.address, test.more, s.String(), err, test.want)
		case test.err != "" && (err == nil || err.Error() != test.err):
			t.Errorf("%s %s:\ngot  %v\nwant %s", test.address, test.more, err, test.err)
		}
	}
}

// readRedis reads the JSON of a Redis, whose last brace and comma are not written.
func readRedis(t *testing.T, config string) *Redis {
	t.Helper()
	r := new(Redis)
	if err := caddy.StrictUnmarshalJSON([]byte(strings.TrimSuffix(config, ",")+"}"), r); err != nil {
		t.Fatalf("%s: %v", config, err)
	}
	return r
}

func TestLiteralPassword(t *testing.T) {
	for address, want := range map[string]bool{
		"redis://:secret@localhost":                     true,
		"redis://user:secret@{env.REDIS_HOST}:6379/0":   true,
		"redis://:sec@ret@localhost":                    true,
		`redis://:sec\{ret@localhost`:                   true,
		"redis://user:{env.REDIS_PASSWORD}@localhost/0": false,
		"redis://user@localhost":                        false,
		"redis://localhost:6379":                        false,
		"localhost:6379":                                false,
		"{env.REDIS_URL}":                               false,
	} {
		if got := (&Redis{Address: []string{address}}).literalPassword(); got != want {
			t.Errorf("%s: %v", address, got)
		}
	}
}

func TestOpenSecrets(t *testing.T) {
	for config, want := range map[string][]string{
		`"address":["a:1"]`:                           nil,
		`"address":["redis://:secret@a:1"]`:           {"password"},
		`"password":"secret"`:                         {"password"},
		`"password":12345`:                            {"password"},
		`"password":"{env.SECRET}"`:                   {},
		`"sentinel_password":"{file./run/secrets/a}"`: {},
		`"username":"bob","tls_client_cert_pem":"x","tls_client_key_path":"/a"`:            {},
		`"password":"p","sentinel_password":"{env.A}","tls_client_key_pem":"-----BEGIN x"`: {"password", "tls_client_key_pem"},
	} {
		if got := readRedis(t, "{"+config).openSecrets(); !slices.Equal(got, want) {
			t.Errorf("%s: got %v, want %v", config, got, want)
		}
	}
}

// Every option stands in one of these blocks.
const (
	allOfSentinel = `redis a:26379 b:26379 {
	username bob
	password secret
	db 3
	master_name main
	sentinel_username guard
	sentinel_password secret2
	pool_size 16
	timeout 20ms
	sensitive_timeout 2s
}`
	allOfCluster = `redis {
	address a:6379 b:6379
	username bob
	password secret
	cluster true
	tls_enabled true
	tls_insecure true
	tls_server_name redis.internal
	tls_server_certs_pem %s
	tls_client_cert_pem %s
	tls_client_key_pem %s
}`
	allOfTLS = `redis a:6379 {
	db 3
	tls_enabled on
	tls_server_certs_path %s
	tls_client_cert_path %s
	tls_client_key_path %s
}`
)

// Every option reaches the settings, from a Caddyfile by JSON, written out and by placeholders.
func TestAllRedisOptions(t *testing.T) {
	keys := newTestKeys(t)
	text := fmt.Sprintf
	for name, test := range map[string]struct {
		config string
		want   redisSettings
	}{
		"sentinel": {allOfSentinel, redisSettings{
			kind: redisSentinel, network: "tcp", addresses: "a:26379,b:26379", username: "bob", password: "secret", db: 3, master: "main",
			sentinelUsername: "guard", sentinelPassword: "secret2", poolSize: 16, timeout: 20 * time.Millisecond, patience: 2 * time.Second,
		}},
		"cluster": {text(allOfCluster, quoted(keys.ca), quoted(keys.cert), quoted(keys.key)), redisSettings{
			kind: redisCluster, network: "tcp", addresses: "a:6379,b:6379", username: "bob", password: "secret",
			tls:      tlsSettings{enabled: true, insecure: true, serverName: "redis.internal", ca: keys.ca, cert: keys.cert, key: keys.key},
			poolSize: 8, timeout: 50 * time.Millisecond, patience: 500 * time.Millisecond,
		}},
		"TLS": {text(allOfTLS, keys.file("ca"), keys.file("cert"), keys.file("key")), redisSettings{
			network: "tcp", addresses: "a:6379", db: 3,
			tls:      tlsSettings{enabled: true, ca: keys.ca, cert: keys.cert, key: keys.key},
			poolSize: 8, timeout: 50 * time.Millisecond, patience: 500 * time.Millisecond,
		}},
	} {
		for how, config := range map[string]string{"written out": test.config, "placeholders": byPlaceholders(t, test.config)} {
			r := redisOf(t, config)
			if got, err := r.settings(); err != nil || got != test.want {
				t.Errorf("%s, %s: %v\ngot  %+v\nwant %+v", name, how, err, got, test.want)
			}
			if how == "placeholders" && strings.Contains(asJSON(t, r), "secret") {
				t.Errorf("%s: a placeholder is replaced when the Caddyfile is read: %s", name, asJSON(t, r))
			}
			again := new(Redis)
			if err := caddy.StrictUnmarshalJSON([]byte(asJSON(t, r)), again); err != nil || asJSON(t, again) != asJSON(t, r) {
				t.Errorf("%s, %s: written as %s, read as %s, %v", name, how, asJSON(t, r), asJSON(t, again), err)
			}
		}
	}
}

// No option is missing above.
func TestAllRedisOptionsAreTested(t *testing.T) {
	all := allOfSentinel + allOfCluster + allOfTLS
	for name := range new(Redis).options(new(redisSettings)) {
		if !strings.Contains(all, "\t"+name+" ") {
			t.Errorf("%s is in no test", name)
		}
	}
}

func quoted(text string) string { return "`" + text + "`" }

// byPlaceholders puts every value of a block into an environment variable or a file of its own, and its name in place.
func byPlaceholders(t *testing.T, config string) string {
	t.Helper()
	folder, n := t.TempDir(), 0
	replace := func(value string) string {
		n++
		if n%2 == 0 {
			file := filepath.Join(folder, fmt.Sprint(n))
			if err := os.WriteFile(file, []byte(value+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			return "{file." + file + "}"
		}
		name := fmt.Sprintf("TOLLGATE_TEST_%s_%d", filepath.Base(folder), n)
		t.Setenv(name, value)
		return "{env." + name + "}"
	}
	tokens, err := caddyfileTokens(config)
	if err != nil {
		t.Fatal(err)
	}
	var lines strings.Builder
	for _, line := range tokens {
		for i, token := range line {
			if i > 0 && token != "{" {
				token = replace(token)
			}
			lines.WriteString(token + " ")
		}
		lines.WriteString("\n")
	}
	return lines.String()
}

// redisOf returns what a block of a Caddyfile is in JSON.
func redisOf(t *testing.T, block string) *Redis {
	t.Helper()
	config, err := adapted("{\n\trate_limit {\n" + block + "\n}\n}\n")
	if err != nil {
		t.Fatalf("%s\n%v", block, err)
	}
	var parsed struct {
		Apps struct {
			Limit struct {
				Redis *Redis `json:"redis"`
			} `json:"rate_limit"`
		} `json:"apps"`
	}
	if err := json.Unmarshal(config, &parsed); err != nil || parsed.Apps.Limit.Redis == nil {
		t.Fatalf("%s: %v", config, err)
	}
	return parsed.Apps.Limit.Redis
}

func asJSON(t *testing.T, r *Redis) string {
	t.Helper()
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// A placeholder that comes to nothing is an error that names the option and the placeholder, whatever the option is.
func TestEmptyPlaceholderOfRedis(t *testing.T) {
	t.Setenv("TOLLGATE_TEST_EMPTY", "")
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, []byte("\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name := range new(Redis).options(new(redisSettings)) {
		for _, placeholder := range []string{"{env.TOLLGATE_TEST_EMPTY}", "{file." + empty + "}"} {
			_, err := redisOf(t, "redis {env.TOLLGATE_TEST_ADDRESS} {\n"+name+" "+placeholder+"\n}").at("a:1").settings()
			if want := "redis: " + name + ": evaluated placeholder " + placeholder + " is empty"; err == nil || err.Error() != want {
				t.Errorf("%s %s: got %v, want %s", name, placeholder, err, want)
			}
		}
	}
}

func (r *Redis) at(address string) *Redis {
	r.Address = []string{address}
	return r
}

// In JSON, values are text, numbers or booleans. Nothing else is, nor is it repeated.
func TestRedisInJSON(t *testing.T) {
	for _, wrong := range []string{`{"hunter2":1}`, `["hunter2"]`, `""`, `{}`} {
		for name := range new(Redis).options(new(redisSettings)) {
			err := json.Unmarshal([]byte(`{"`+name+`":`+wrong+`}`), new(Redis))
			if err == nil || err.Error() != errSetting.Error() {
				t.Errorf("%s %s: got %v", name, wrong, err)
			}
		}
	}
	r := readRedis(t, `{"password":12345,"db":null,"timeout":null,"cluster":false`)
	if r.Password != "12345" || r.DB != "" || r.Timeout != "" || r.Cluster != "false" {
		t.Errorf("got %+v", r)
	}
}

// No error and no log line holds a secret, where it belongs and where it stands by mistake.
func TestRedisErrorsHoldNoSecret(t *testing.T) {
	keys := newTestKeys(t)
	secrets := map[string]string{"TOLLGATE_TEST_PASSWORD": "hunter2", "TOLLGATE_TEST_KEY": keys.key}
	var names []string
	for name := range new(Redis).options(new(redisSettings)) {
		names = append(names, name)
	}
	check := func(what, text string) {
		for _, secret := range []string{"hunter2", strings.Split(keys.key, "\n")[1]} {
			if strings.Contains(text, secret) {
				t.Errorf("%s shows a secret: %s", what, text)
			}
		}
	}
	for variable, secret := range secrets {
		t.Setenv(variable, secret)
		for _, name := range names {
			for _, address := range []string{"a:1", "rediss://a:1", "{env." + variable + "}", "redis://:{env." + variable + "}@a:1", "redis://:{env." + variable + "}"} {
				r := redisOf(t, "redis {env.A} {\n"+name+" {env."+variable+"}\n}").at(address)
				s, err := r.settings()
				check(name, fmt.Sprint(err))
				if name != "master_name" { // which is no secret: logs name the master
					check(name, s.String())
				}
				check(name, asJSON(t, r))
			}
		}
	}
	for _, name := range []string{"password", "sentinel_password", "tls_client_key_pem", "tls_client_key_path"} {
		for _, after := range []string{"", "\n" + name + " hunter2", "\nbogus", "\ncluster\nmaster_name a", "\nusername", "\ntls_client_cert_pem {env.A}"} {
			for _, value := range []string{"hunter2", "hunter2 hunter2", "`" + keys.key + "`", keys.key, "hunter2 {\n}"} {
				_, err := adapted(fmt.Sprintf(inBlock, "redis a:1 {\n"+name+" "+value+after+"\n}"))
				check(name, fmt.Sprint(err))
			}
		}
	}
}
