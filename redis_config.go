package ratelimit

// This file says what a configuration can write about Redis, and resolves it. redis_address.go reads addresses, redis_tls.go
// what proves who is who.

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
)

const (
	defaultTimeout          = 50 * time.Millisecond
	defaultSensitiveTimeout = 500 * time.Millisecond
	defaultPoolSize         = 8
	maxPoolSize             = 10_000
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

	// The most connections of this process to each server. Default 8.
	PoolSize Setting `json:"pool_size,omitempty"`

	// How long a decision may take; then it is made without Redis. Default 50ms.
	Timeout DurationSetting `json:"timeout,omitempty"`

	// The same for a decision about a sensitive zone: it may wait longer, since it is refused without Redis. Default 500ms.
	SensitiveTimeout DurationSetting `json:"sensitive_timeout,omitempty"`
}

// redisOption is where an option stands in the configuration, and how it gets into the settings.
type redisOption struct {
	written *Setting
	form    redisForm
	read    func(text string) error
}

type redisForm int

const (
	formText   redisForm = iota // anything will do
	formSecret                  // the same, and nobody may see it
	formPath                    // of a file that holds what is meant
	formExact                   // a number or a duration
	formSwitch                  // on or off
)

// options is the table of all options but the address.
func (r *Redis) options(s *redisSettings) map[string]redisOption {
	return map[string]redisOption{
		"username":              {&r.Username, formText, asText(&s.username)},
		"password":              {&r.Password, formSecret, asText(&s.password)},
		"db":                    {&r.DB, formExact, asNumber(&s.db, 0, math.MaxInt32)},
		"master_name":           {&r.MasterName, formText, asText(&s.master)},
		"sentinel_username":     {&r.SentinelUsername, formText, asText(&s.sentinelUsername)},
		"sentinel_password":     {&r.SentinelPassword, formSecret, asText(&s.sentinelPassword)},
		"cluster":               {&r.Cluster, formSwitch, asSwitch(s.setCluster)},
		"tls_enabled":           {&r.TLSEnabled, formSwitch, asSwitch(func(on bool) { s.tls.enabled = on })},
		"tls_insecure":          {&r.TLSInsecure, formSwitch, asSwitch(func(on bool) { s.tls.insecure = on })},
		"tls_server_name":       {&r.TLSServerName, formText, asText(&s.tls.serverName)},
		"tls_server_certs_path": {&r.TLSServerCertsPath, formPath, asText(&s.tls.ca)},
		"tls_server_certs_pem":  {&r.TLSServerCertsPEM, formText, asText(&s.tls.ca)},
		"tls_client_cert_path":  {&r.TLSClientCertPath, formPath, asText(&s.tls.cert)},
		"tls_client_cert_pem":   {&r.TLSClientCertPEM, formText, asText(&s.tls.cert)},
		"tls_client_key_path":   {&r.TLSClientKeyPath, formPath, asText(&s.tls.key)},
		"tls_client_key_pem":    {&r.TLSClientKeyPEM, formSecret, asText(&s.tls.key)},
		"pool_size":             {&r.PoolSize, formExact, asNumber(&s.poolSize, 1, maxPoolSize)},
		"timeout":               {(*Setting)(&r.Timeout), formExact, asDuration(&s.timeout)},
		"sensitive_timeout":     {(*Setting)(&r.SensitiveTimeout), formExact, asDuration(&s.patience)},
	}
}

func asText(to *string) func(string) error {
	return func(text string) error {
		*to = text
		return nil
	}
}

func asNumber(to *int, lowest, highest int) func(string) error {
	return func(text string) error {
		n, err := strconv.Atoi(text)
		if err != nil || n < lowest || n > highest {
			return fmt.Errorf("write a whole number from %d to %d", lowest, highest)
		}
		*to = n
		return nil
	}
}

func asDuration(to *time.Duration) func(string) error {
	return func(text string) error {
		d, err := caddy.ParseDuration(text)
		if err != nil || d <= 0 || d > longestDuration {
			return errors.New("write a duration above 0 and below 10 years, with its unit, like 50ms, 10s or 1h")
		}
		*to = d
		return nil
	}
}

func asSwitch(set func(on bool)) func(string) error {
	return func(text string) error {
		switch text {
		case "on", "true":
			set(true)
		case "off", "false":
			set(false)
		default:
			return errors.New("write on, off, true or false")
		}
		return nil
	}
}

// resolved returns what an option is once its placeholders are replaced, and the content of the file that it names.
func (o redisOption) resolved() (string, error) {
	text, err := expand(string(*o.written))
	if err == nil && o.form == formPath {
		return readPEM(text)
	}
	return text, err
}

// asWritten leaves placeholders and names of files for what they are.
func (o redisOption) asWritten() (string, error) { return string(*o.written), nil }

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

// apply reads the value of an option. What it quotes is what stands in the configuration, of options without secrets.
func (o redisOption) apply(name string, value func(redisOption) (string, error)) error {
	text, err := value(o)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if err := o.read(text); err != nil {
		return fmt.Errorf("%s %q: %w", name, *o.written, err)
	}
	return nil
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

// String names the servers in logs, without credentials.
func (s *redisSettings) String() string {
	switch s.kind {
	case redisCluster:
		return "cluster " + s.addresses
	case redisSentinel:
		return s.master + "/" + strconv.Itoa(s.db) + " of sentinels " + s.addresses
	}
	return s.addresses + "/" + strconv.Itoa(s.db)
}
