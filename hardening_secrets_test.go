package ratelimit

import (
	"fmt"
	"strings"
	"testing"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// No secret and no key of a client leaves the process: not in logs, errors, admin answers, nor in Redis. Answers gateways C-1 12
// and 14, C-10 113, caddy-field c 33, 34, 43, 57, DESIGN §6 "Secrets".
func TestNoSecretGetsOut(t *testing.T) {
	const password, secret, key = "pw-7d1f3c", "hmac-91b2ee", "client-key-55aa"
	redis := redistest.Start(t, "--requirepass", password)
	redis.Do("config", "set", "slowlog-log-slower-than", "0")
	redis.Do("config", "set", "slowlog-max-len", "10000")
	config := func(url string) string {
		return site("redis "+url+" {\n timeout 5s\n sensitive_timeout 5s\n}\nnodes 1\ntop\nkey_secret {env.SECRET}",
			"penalty {\n after 0\n}\nzone api {\n key {header.X-Api-Key}\n rate 1/h\n burst 1\n}\nzone address {\n rate 1/h\n burst 2\n}")
	}
	n := node.Start(t, config("{env.REDIS_URL}"), node.Env("REDIS_URL", redis.URL()), node.Env("SECRET", secret), node.Env("WRONG", strings.Replace(redis.URL(), password, "wrong-"+password, 1)))
	var seen strings.Builder
	show := func(answer *node.Response) { fmt.Fprintf(&seen, "%v %s\n", answer.Header, answer.Body) }
	for range 5 {
		show(n.Get("/", "X-Api-Key: "+key))
	}
	adminAnswers := func() {
		for path, methods := range adminRoutes() {
			if methods["GET"] != nil {
				show(n.Admin("GET", "/rate_limit/"+path, ""))
			}
		}
		for _, path := range []string{"inspect", "unblock", "reset"} {
			show(n.Admin("POST", "/rate_limit/"+path, `{"zone":"api","key":"`+key+`"}`))
		}
		show(n.Admin("POST", "/rate_limit/block", `{"zone":"api","key":"`+key+`","for":"1m"}`))
		show(n.Admin("POST", "/rate_limit/override", `{"zone":"api","action":"allow","for":"1m"}`))
		// Who names it in the wrong place is told so; the log is not.
		_ = n.Admin("POST", "/rate_limit/inspect", `{"zone":"address","key":"`+key+`"}`)
		_ = n.Admin("POST", "/rate_limit/inspect", `{"zone":"api","id":"`+key+`"}`)
	}
	adminAnswers()
	for _, path := range []string{"/metrics", "/config/"} {
		show(n.Admin("GET", path, ""))
	}
	for _, wrong := range []string{"redis://:" + password + "%zz@127.0.0.1", "http://:" + password + "@127.0.0.1", "redis://:" + password + "@127.0.0.1/zero", "redis://:" + password + "@127.0.0.1?x=1", `"` + password + `"`,
		password + "@127.0.0.1:6379", password + "://127.0.0.1", "redis://:12#" + password + "@127.0.0.1", "redis://:12?" + password + "@127.0.0.1", "redis://:{" + password + "}@127.0.0.1"} {
		if err := n.Load(config(wrong)); err == nil {
			t.Errorf("%s loads", wrong)
		} else {
			fmt.Fprintln(&seen, err)
		}
	}
	for _, wrong := range []string{
		"password " + password + "\nusername {env.NONE}", "password " + password + " " + password, "password {" + password + "}", "sentinel_password " + password,
		"db {env.SECRET}", "cluster {env.SECRET}", "timeout {env.SECRET}", "tls_client_key_path {env.SECRET}", "tls_server_certs_pem {env.SECRET}",
		"tls_enabled\ntls_client_cert_pem {env.SECRET}\ntls_client_key_pem " + password, "tls_enabled\ntls_client_key_pem `-----BEGIN " + password + "`",
	} {
		err := n.Load(site("redis 127.0.0.1:6379 {\n"+wrong+"\n}\nnodes 1\nkey_secret {env.SECRET}", "zone api {\n rate 1/h\n}"))
		if err == nil {
			t.Errorf("%s loads", wrong)
		}
		fmt.Fprintln(&seen, err)
	}
	for _, line := range redis.Keys() {
		fmt.Fprintln(&seen, line)
		if strings.HasPrefix(line, "tollgate:{") {
			fmt.Fprintln(&seen, redis.Do("hgetall", line))
		} else {
			fmt.Fprintln(&seen, redis.Do("zrange", line, 0, -1))
		}
	}
	sent := fmt.Sprint(redis.Do("slowlog", "get", "10000")) // all that Redis was told
	if !strings.Contains(sent, "evalsha") && !strings.Contains(sent, "EVALSHA") {
		t.Errorf("the log of Redis holds no decision: %s", sent)
	}
	for what, text := range map[string]string{"the client's key": key, "its address": "127.0.0.1 ", "the HMAC key": secret} {
		if strings.Contains(strings.ReplaceAll(sent, "127.0.0.1:", ""), text) {
			t.Errorf("Redis was told %s", what)
		}
	}
	if err := n.Load(config("{env.WRONG}")); err != nil { // what Redis refuses is said in the log only
		t.Fatal(err)
	}
	proc.Eventually(t, "the wrong password is noticed", func() bool {
		show(n.Get("/", "X-Api-Key: "+key))
		return n.LogLines("deciding without it") > 0
	})
	adminAnswers()
	for what, text := range map[string]string{"password": password, "HMAC key": secret, "client's key": key} {
		if strings.Contains(seen.String(), text) {
			i := strings.Index(seen.String(), text)
			t.Errorf("the %s gets out: …%s", what, seen.String()[max(0, i-200):i+len(text)])
		}
		if n.LogLines(text) != 0 {
			t.Errorf("the %s is in the log", what)
		}
	}
	checkKeys(t, redis, maxFill, key, secret, password, "127.0.0.1")
}
