package ratelimit

// This file is the table of the options about Redis: the Caddyfile is read by it, and a configuration is resolved by it.

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"
)

const maxPoolSize = 10_000

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
		"pool_size":             {&r.PoolSize, formExact, asNumber(&s.poolSize, warmConns, maxPoolSize)},
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
