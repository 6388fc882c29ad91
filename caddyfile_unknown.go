package ratelimit

// This file answers options that do not exist where they are written with what was probably meant.

import "strings"

const (
	writeRate  = "write rate, like rate 100/m"
	writeRedis = "write redis <address> to share limits between nodes"
)

// otherWords are options of other limiters, and what they are called here.
var otherWords = map[string]string{
	"average":         writeRate,
	"interval":        writeRate,
	"limit":           writeRate,
	"max_requests":    writeRate,
	"period":          writeRate,
	"requests":        writeRate,
	"matcher":         "write match",
	"delay":           "there is no queue, a refusal is answered at once: leave it out",
	"nodelay":         "there is no queue, a refusal is answered at once: leave it out",
	"distributed":     writeRedis,
	"storage":         writeRedis,
	"sweep_interval":  "nothing has to be swept: leave it out",
	"disable_metrics": "client keys are never in metrics: leave it out",
	"status_code":     "a refusal is 429; to answer otherwise, write answer error and handle_errors",
	"whitelist":       "write exempt <matcher> in the rate_limit block",
	"allowlist":       "write exempt <matcher> in the rate_limit block",
	"max_in_flight":   "write the number behind shed, like shed 100",
}

// otherRedisWords are options of Caddy's storages in Redis, and what they are called in a redis block.
var otherRedisWords = map[string]string{
	"host":             "write host:port behind redis",
	"port":             "write host:port behind redis",
	"url":              "write it behind redis",
	"key_prefix":       "write prefix in the global option rate_limit",
	"route_by_latency": "masters make all decisions: leave it out",
	"route_randomly":   "masters make all decisions: leave it out",
	"encryption_key":   "keys are hashed under key_secret, and nothing else is secret: leave it out",
	"compression":      "nothing is large enough: leave it out",
	"storage":          "buckets are all that is kept: leave it out",
	"client_type":      "write cluster, or master_name for Sentinel, or neither",
	"failover":         "write master_name, and the addresses of the Sentinels behind redis",
	"sentinel":         "write master_name, and the addresses of the Sentinels behind redis",
	"pool":             "write pool_size",
	"tls":              "write tls_enabled",
	"tls_server_certs": "write tls_server_certs_path or tls_server_certs_pem",
	"tls_client_cert":  "write tls_client_cert_path or tls_client_cert_pem",
	"tls_client_key":   "write tls_client_key_path or tls_client_key_pem",
}

// unknown is the error for an option that the block does not have.
func (b blockReader) unknown(word string, known []string) error {
	list := "; known here: " + strings.Join(known, ", ")
	if strings.Contains(word, "://") || strings.LastIndex(word, "@") > 0 { // may hold a password
		return b.errorf("a URL is no option%s", list)
	}
	return b.errorf("unknown option %.60q%s%s", word, b.guess(word, known), list)
}

func (b blockReader) guess(word string, known []string) string {
	if strings.HasPrefix(word, "@") {
		return ": named matchers are defined in the site, beside rate_limit"
	}
	if hint := b.otherWord(word); hint != "" {
		return ": " + hint
	}
	for _, room := range b.rooms() {
		if _, ok := room.table[word]; ok {
			return ": it belongs in " + room.name
		}
	}
	if near := nearest(word, known); near != "" {
		return " (did you mean " + near + "?)"
	}
	return ""
}

func (b blockReader) otherWord(word string) string {
	if hint, ok := otherRedisWords[word]; ok && b.subject == "redis" {
		return hint
	}
	return otherWords[word]
}

type room struct {
	name  string
	table optionTable
}

// rooms are all blocks with their options.
func (b blockReader) rooms() []room {
	z := &zoneReader{blockReader: b, zone: new(Zone)}
	return []room{
		{"a zone", z.options()},
		{"the rate_limit block", handlerOptions(b, new(Handler))},
		{"the global option rate_limit", appOptions(b, new(App))},
		{"the penalty block", penaltyOptions(b, new(Penalty))},
		{"the shed block", shedOptions(b, new(Shed))},
		{"the redis block", redisOptions(b, new(Redis))},
	}
}

// nearest returns the word that is at most two typing errors away, the first of the nearest, or nothing.
func nearest(word string, known []string) string {
	best, found := min(3, len(word)), ""
	if len(word) > 32 {
		return ""
	}
	for _, candidate := range known {
		if d := editDistance(word, candidate, 1); d < best {
			best, found = d, candidate
		}
	}
	return found
}
