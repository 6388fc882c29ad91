package ratelimit

// This file says what a configuration can write about Redis, and resolves it. redis_options.go holds the table of its options,
// redis_address.go reads addresses, redis_tls.go what proves who is who.

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

const (
	defaultTimeout          = 50 * time.Millisecond
	defaultSensitiveTimeout = 500 * time.Millisecond
	defaultPoolSize         = 8
)

// Redis says where buckets live that many nodes share. In every value, placeholders like `{env.REDIS_PASSWORD}` and
// `{file./run/secrets/redis}` are replaced when the configuration loads; one that is empty is an error.
type Redis struct {
	// No Redis: buckets live in this process, even if the app names a Redis.
	Off bool `json:"off,omitempty"`

	// Host and port, or a URL: `redis://user:password@host:6379/0`, `rediss://…` for TLS, `unix:///run/redis.sock?db=0`.
	// Several with `cluster` or `master_name`, each as host and port; one value can hold several, separated by commas.
	Address []string `json:"address,omitempty"`

	// The user (ACL) and the password. Default: none, or those of the URL.
	Username Setting `json:"username,omitempty"`
	Password Setting `json:"password,omitempty"`

	// The number of the database. Default 0. A Cluster has only that one.
	DB Setting `json:"db,omitempty"`

	// The name of the master that Sentinels watch. The addresses are those of the Sentinels then.
	MasterName Setting `json:"master_name,omitempty"`

	// The user and the password of the Sentinels themselves. Default: none.
	SentinelUsername Setting `json:"sentinel_username,omitempty"`
	SentinelPassword Setting `json:"sentinel_password,omitempty"`

	// Whether this is a Redis Cluster: `true` or `false` (default). One address is enough, the others are asked for.
	Cluster Setting `json:"cluster,omitempty"`

	// Whether connections are encrypted: `true` or `false`. Default: whether the URL is `rediss://`.
	TLSEnabled Setting `json:"tls_enabled,omitempty"`

	// Whether the certificate of Redis goes unverified, so that anybody in between can be Redis: `true` or `false` (default).
	TLSInsecure Setting `json:"tls_insecure,omitempty"`

	// The name that the certificate of Redis must have. Default: the host that is connected to.
	TLSServerName Setting `json:"tls_server_name,omitempty"`

	// The CA certificates that the certificate of Redis must go back to, as a file or as text (PEM). Default: those of the system.
	TLSServerCertsPath Setting `json:"tls_server_certs_path,omitempty"`
	TLSServerCertsPEM  Setting `json:"tls_server_certs_pem,omitempty"`

	// The certificate that Redis is shown, as a file or as text (PEM), with its chain. Needs a key.
	TLSClientCertPath Setting `json:"tls_client_cert_path,omitempty"`
	TLSClientCertPEM  Setting `json:"tls_client_cert_pem,omitempty"`

	// The key of that certificate, as a file or as text (PEM).
	TLSClientKeyPath Setting `json:"tls_client_key_path,omitempty"`
	TLSClientKeyPEM  Setting `json:"tls_client_key_pem,omitempty"`

	// The most connections of this process to each server, at least 3. Default 8.
	PoolSize Setting `json:"pool_size,omitempty"`

	// How long a decision may take; then it is made without Redis. Default 50ms.
	Timeout DurationSetting `json:"timeout,omitempty"`

	// The same for a decision about a sensitive zone: it may wait longer, since it is refused without Redis. Default 500ms.
	SensitiveTimeout DurationSetting `json:"sensitive_timeout,omitempty"`
}

type redisKind int

const (
	redisStandalone redisKind = iota
	redisSentinel
	redisCluster
)

// redisSettings are what a Redis block comes to once its placeholders are replaced. They are comparable: equal
// settings share one client.
type redisSettings struct {
	kind      redisKind
	network   string // tcp or unix
	addresses string // host:port or path; several separated by commas, in the order written
	prefix    string // of all keys

	username, password                 string
	db                                 int
	master                             string // Sentinel only
	sentinelUsername, sentinelPassword string

	tls               tlsSettings
	poolSize          int
	timeout, patience time.Duration
}

// settings resolves a Redis block. Errors never repeat what placeholders came to: it can be a password.
func (r *Redis) settings() (redisSettings, error) {
	addresses, err := r.expandAddresses()
	if err != nil {
		return redisSettings{}, fmt.Errorf("redis: %w; write redis off to keep buckets in this process", err)
	}
	s, err := r.combine(addresses, redisOption.resolved)
	if err == nil {
		_, err = s.tls.config()
	}
	if err != nil {
		return redisSettings{}, fmt.Errorf("redis: %w", err)
	}
	return s, nil
}

func (r *Redis) expandAddresses() (addresses []string, err error) {
	addresses = make([]string, len(r.Address))
	for i, address := range r.Address {
		if addresses[i], err = expand(address); err != nil {
			return nil, err
		}
	}
	return addresses, nil
}

// combine puts the addresses and the options together, whose values it gets from the function.
func (r *Redis) combine(addresses []string, value func(redisOption) (string, error)) (redisSettings, error) {
	s := redisSettings{poolSize: defaultPoolSize, timeout: defaultTimeout}
	inURL, err := s.dial(addresses)
	if err != nil {
		return s, err
	}
	secured, options := s.tls.enabled, r.options(&s)
	for _, name := range sortedNames(options) {
		if *options[name].written == "" {
			continue
		}
		if inURL[name] {
			return s, fmt.Errorf("%s stands in the URL and in the block: write it in one of them", name)
		}
		if err := options[name].apply(name, value); err != nil {
			return s, err
		}
	}
	if secured && !s.tls.enabled {
		return s, errors.New("the URL begins with rediss, which is TLS, but tls_enabled is off: write redis://, or leave tls_enabled out")
	}
	s.setDefaults()
	return s, cmp.Or(r.checkSources(), s.check(), s.tls.check(), s.checkTimes())
}

func (s *redisSettings) setCluster(on bool) {
	if on {
		s.kind = redisCluster
	}
}

func (s *redisSettings) setDefaults() {
	if s.master != "" && s.kind != redisCluster {
		s.kind = redisSentinel
	}
	if s.patience == 0 {
		s.patience = max(defaultSensitiveTimeout, s.timeout)
	}
}

// checkSources makes sure that nothing is given both as a file and as text.
func (r *Redis) checkSources() error {
	options := r.options(new(redisSettings))
	for _, name := range []string{"tls_server_certs", "tls_client_cert", "tls_client_key"} {
		if *options[name+"_path"].written != "" && *options[name+"_pem"].written != "" {
			return fmt.Errorf("%s_path and %s_pem say the same: write one of them", name, name)
		}
	}
	return nil
}

// check holds the settings against each other: what would be ignored, or mean two things, is an error.
func (s *redisSettings) check() error {
	several := len(s.addressList()) > 1
	switch {
	case s.kind == redisCluster && s.master != "":
		return errors.New("cluster and master_name are two ways to run Redis: write cluster for a Redis Cluster, or master_name for a master that Sentinels watch")
	case s.kind == redisStandalone && several:
		return errors.New("several addresses are one Redis only with cluster, or with master_name and the addresses of its Sentinels: write one of these")
	case s.kind != redisSentinel && s.sentinelUsername+s.sentinelPassword != "":
		return errors.New("sentinel_username and sentinel_password are for Sentinels: write master_name too, or username and password for Redis itself")
	case s.kind == redisCluster && s.db != 0:
		return errors.New("a Redis Cluster has no db but 0: leave it out, and tell environments apart by prefix")
	case s.network == "unix" && s.kind != redisStandalone:
		return errors.New("cluster and master_name need addresses as host:port: a unix socket leads to one server only")
	case s.network == "unix" && s.tls.enabled:
		return errors.New("a unix socket does not leave this machine and has no TLS: leave tls_enabled out")
	case s.username != "" && s.password == "":
		return errors.New("username needs a password: Redis is told both or none")
	case s.sentinelUsername != "" && s.sentinelPassword == "":
		return errors.New("sentinel_username needs a sentinel_password: Sentinels are told both or none")
	}
	return nil
}

func (s *redisSettings) checkTimes() error {
	if s.timeout < time.Millisecond || s.patience < s.timeout {
		return fmt.Errorf("timeout must be at least 1ms and sensitive_timeout at least timeout, got %s and %s", s.timeout, s.patience)
	}
	return nil
}

// isSettled says whether what is written tells already how things fit together. Text and files may be placeholders then: for that
// it only matters that they are there.
func (r *Redis) isSettled() bool {
	if hasPlaceholder(strings.Join(r.Address, " ")) {
		return false
	}
	for _, o := range r.options(new(redisSettings)) {
		if (o.form == formExact || o.form == formSwitch) && hasPlaceholder(string(*o.written)) {
			return false
		}
	}
	return true
}

// holdsPEM says whether all certificates and keys stand in the configuration itself.
func (r *Redis) holdsPEM() bool {
	return r.TLSServerCertsPath+r.TLSClientCertPath+r.TLSClientKeyPath == "" &&
		!hasPlaceholder(string(r.TLSServerCertsPEM+r.TLSClientCertPEM+r.TLSClientKeyPEM))
}

// openSecrets returns the options whose secrets can be read in the configuration itself.
func (r *Redis) openSecrets() (names []string) {
	options := r.options(new(redisSettings))
	for _, name := range sortedNames(options) {
		o := options[name]
		if o.form == formSecret && isOpen(string(*o.written)) || name == "password" && r.literalPassword() {
			names = append(names, name)
		}
	}
	return names
}

// place names the part of a Redis where the state is that these settings lead to, however they lead there.
func (s *redisSettings) place() string { return s.network + " " + s.String() + " " + s.prefix }

// String names the servers in logs, without credentials.
func (s *redisSettings) String() string {
	switch s.kind {
	case redisCluster:
		return "cluster " + s.addresses
	case redisSentinel:
		return s.master + "/" + strconv.Itoa(s.db) + " of sentinels " + s.addresses
	case redisStandalone:
	}
	return s.addresses + "/" + strconv.Itoa(s.db)
}
