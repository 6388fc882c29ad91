package ratelimit

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/redis/go-redis/v9"
)

const (
	defaultTimeout          = 50 * time.Millisecond
	defaultSensitiveTimeout = 500 * time.Millisecond
)

// Redis says where buckets live that many nodes share.
type Redis struct {
	// No Redis: buckets live in this process, even if the app names a Redis.
	Off bool `json:"off,omitempty"`

	// Host and port, or a URL like `redis://user:password@host:6379/0`. Placeholders like `{env.REDIS_URL}` and
	// `{file./run/secrets/redis}` are replaced when the configuration loads.
	Address []string `json:"address,omitempty"`

	// How long a decision may take; then it is made without Redis. Default 50ms.
	Timeout caddy.Duration `json:"timeout,omitempty"`

	// The same for a decision about a sensitive zone: it may wait longer, since it is refused without Redis. Default 500ms.
	SensitiveTimeout caddy.Duration `json:"sensitive_timeout,omitempty"`
}

// redisKind is what stands at the other end of a connection.
type redisKind uint8

const (
	redisStandalone redisKind = iota
	redisSentinel
	redisCluster
)

// redisSettings are what a Redis block comes to once its placeholders are replaced. They are comparable: equal
// settings share one client.
type redisSettings struct {
	kind                               redisKind
	network, addresses                 string
	prefix                             string // of all keys
	username, password                 string
	db                                 int
	master                             string
	sentinelUsername, sentinelPassword string
	tls                                tlsSettings
	poolSize                           int
	timeout, patience                  time.Duration
}

type tlsSettings struct{ enabled bool }

func (t *tlsSettings) config() (*tls.Config, error) { return nil, nil }

func (s *redisSettings) addressList() []string { return strings.Split(s.addresses, ",") }

// settings resolves a Redis block. Errors never repeat an address: it can hold a password.
func (r *Redis) settings() (redisSettings, error) {
	s := redisSettings{poolSize: 8, timeout: time.Duration(r.Timeout), patience: time.Duration(r.SensitiveTimeout)}
	if s.timeout == 0 {
		s.timeout = defaultTimeout
	}
	if s.patience == 0 {
		s.patience = max(defaultSensitiveTimeout, s.timeout)
	}
	if s.timeout < time.Millisecond || s.patience < s.timeout {
		return s, fmt.Errorf("redis: timeout must be at least 1ms and sensitive_timeout at least timeout, got %s and %s", s.timeout, s.patience)
	}
	if len(r.Address) != 1 {
		return s, fmt.Errorf("redis: write one address (or off), got %d", len(r.Address))
	}
	address, err := expand(r.Address[0])
	if err != nil {
		return s, fmt.Errorf("redis: %w; write redis off to keep buckets in this process", err)
	}
	if err := s.dial(address); err != nil {
		return s, fmt.Errorf("redis: %w", err)
	}
	return s, nil
}

// literalPassword says whether the configuration itself holds a password. Other parts of the address may be placeholders, with
// which it is no URL yet.
func (r *Redis) literalPassword() bool {
	if len(r.Address) != 1 {
		return false
	}
	_, rest, _ := strings.Cut(r.Address[0], "://")
	_, password, _ := strings.Cut(rest[:max(strings.LastIndexByte(rest, '@'), 0)], ":")
	return password != "" && !strings.Contains(password, "{")
}

// expand replaces the placeholders of a configuration value. Errors never repeat the value, which can be a secret but for one
// placeholder.
func expand(value string) (string, error) {
	resolved, err := caddy.NewReplacer().ReplaceOrErr(value, true, true)
	if err == nil && resolved == "" {
		err = errors.New("it is empty")
	}
	return resolved, err
}

// dial reads an address into the settings.
func (s *redisSettings) dial(address string) error {
	if !strings.Contains(address, "://") {
		_, port, err := net.SplitHostPort(address)
		if _, notANumber := strconv.ParseUint(port, 10, 16); err != nil || notANumber != nil {
			return errors.New("the address has no port: write host:port, or a URL like redis://host:6379/0")
		}
		s.network, s.addresses = "tcp", address
		return nil
	}
	u, err := url.Parse(address)
	if err != nil {
		return errors.New("the URL cannot be parsed; write it like redis://user:password@host:6379/0, special characters in the password as %XX")
	}
	switch u.Scheme {
	case "redis", "unix":
	case "rediss":
		return errors.New("the scheme rediss, Redis over TLS, is not supported yet")
	default:
		return fmt.Errorf("the URL's scheme must be redis or unix, got %q", u.Scheme)
	}
	for name := range u.Query() {
		if u.Scheme != "unix" || name != "db" {
			return fmt.Errorf("the URL has an unknown parameter %q", name)
		}
	}
	o, err := redis.ParseURL(address)
	if err != nil {
		return errors.New("the URL must be like redis://user:password@host:6379/0 or unix:///run/redis.sock?db=0, with the number of a database")
	}
	s.network, s.addresses, s.username, s.password, s.db = o.Network, o.Addr, o.Username, o.Password, o.DB
	return nil
}

// String names the server in logs, without credentials.
func (s *redisSettings) String() string { return s.addresses + "/" + strconv.Itoa(s.db) }

// redisStore keeps the buckets of one configuration in Redis.
type redisStore struct {
	client *redisClient
	prefix string
	list   blockList
}

// Take implements Store. The charges MUST be one part of what split returns.
func (s *redisStore) Take(ctx context.Context, charges []Charge) (Decision, error) {
	out, err := s.client.take(ctx, patient(charges), charges)
	if err != nil {
		return Decision{}, err
	}
	return out.decision(charges, SourceRedis), nil
}

// split implements remoteStore. On a Cluster, what is kept under several keys can be on several servers.
func (s *redisStore) split(charges []Charge) [][]Charge {
	if s.client.settings.kind != redisCluster {
		return nil
	}
	var parts [][]Charge
	for i := range charges {
		same := func(part []Charge) bool { return part[0].ID == charges[i].ID }
		if at := slices.IndexFunc(parts, same); at >= 0 {
			parts[at] = append(parts[at], charges[i])
		} else {
			parts = append(parts, []Charge{charges[i]})
		}
	}
	if len(parts) == 1 {
		return nil
	}
	return parts
}

// giveBack implements remoteStore. If it fails, the tokens flow in again like all others.
func (s *redisStore) giveBack(ctx context.Context, charges []Charge) {
	back := make([]Charge, 0, len(charges))
	for _, c := range charges {
		if !c.DryRun {
			c.Cost, c.Penalty = -c.Cost, nil
			back = append(back, c)
		}
	}
	if len(back) > 0 {
		_, _ = s.client.take(ctx, patient(charges), back)
	}
}

// budget implements remoteStore.
func (s *redisStore) budget(charges []Charge) time.Duration {
	if patient(charges) {
		return s.client.settings.patience
	}
	return s.client.settings.timeout
}

// retryAfter implements remoteStore.
func (s *redisStore) retryAfter(c *Charge) time.Duration { return s.client.retryAfter(s.key(c.ID)) }

func patient(charges []Charge) bool {
	for i := range charges {
		if charges[i].Patient {
			return true
		}
	}
	return false
}

func (s *redisStore) key(id ID) string { return identityKey(s.prefix, id) }
