package ratelimit

// This file reads from a Caddyfile how Redis is reached. No error repeats an address or a secret.

import "strings"

const (
	noAddress    = "an address: perhaps an environment variable is empty; write redis off to do without Redis"
	notOfRequest = "cannot depend on a request: use {env.NAME}, or {file.…} with the absolute path of a file"
)

// redis reads `redis off`, or how Redis is reached:
//
//	redis [<url> | <host:port> …] {
//		address               <host:port> …
//		username              <text>
//		password              <text>
//		db                    <n>
//		master_name           <name>
//		sentinel_username     <text>
//		sentinel_password     <text>
//		cluster               [on | off]
//		tls_enabled           [on | off]
//		tls_insecure          [on | off]
//		tls_server_name       <name>
//		tls_server_certs_path <file>
//		tls_server_certs_pem  <text>
//		tls_client_cert_path  <file>
//		tls_client_cert_pem   <text>
//		tls_client_key_path   <file>
//		tls_client_key_pem    <text>
//		pool_size             <n>
//		timeout               <duration>
//		sensitive_timeout     <duration>
//	}
func (b blockReader) redis(to **Redis) func() error {
	return func() error {
		server, start := new(Redis), b.here()
		*to = server
		if b.CountRemainingArgs() > 0 {
			if err := b.firstAddress(server); err != nil || server.Off {
				return err
			}
		}
		if err := b.moreAddresses(server); err != nil {
			return err
		}
		if _, err := b.in("redis").block(redisOptions(b.in("redis"), server)); err != nil {
			return err
		}
		if len(server.Address) == 0 {
			return start.errorf("redis needs " + noAddress)
		}
		return start.in("redis").fits(server)
	}
}

// firstAddress reads `off` or an address.
func (b blockReader) firstAddress(server *Redis) error {
	return b.value(noAddress, func(_, text string) error {
		hint, isKind := kinds[text]
		switch more := b.CountRemainingArgs() > 0; {
		case isKind:
			return b.in("redis").errorf("%s is no address: %s", text, hint)
		case text != "off":
			return b.address(server)
		case more:
			return b.in("redis").errorf("off takes no argument")
		}
		server.Off = true
		return b.in("redis").end("off")
	})()
}

// kinds are the words by which a storage for Caddy in Redis tells how that runs, where addresses stand here.
var kinds = map[string]string{
	"cluster":  "write the addresses behind redis, and cluster into the block",
	"failover": "write the addresses of the Sentinels behind redis, and master_name into the block",
	"sentinel": "write the addresses of the Sentinels behind redis, and master_name into the block",
}

func (b blockReader) moreAddresses(server *Redis) error {
	for b.NextArg() {
		if err := b.address(server); err != nil {
			return err
		}
	}
	return nil
}

// address reads the current token.
func (b blockReader) address(server *Redis) error {
	text := b.Val()
	switch {
	case strings.TrimSpace(text) == "":
		return b.errorf("redis needs " + noAddress)
	case strings.Contains(text, "{http."):
		return b.in("redis").errorf("the address " + notOfRequest)
	case !hasPlaceholder(text):
		if _, err := new(redisSettings).dial([]string{text}); err != nil {
			return b.in("redis").errorf("%w", err)
		}
	}
	server.Address = append(server.Address, text)
	return nil
}

func redisOptions(b blockReader, r *Redis) optionTable {
	table := optionTable{"address": repeatable(b.addressOption(r))}
	for name, o := range r.options(new(redisSettings)) {
		table[name] = once(b.setting(o))
	}
	return table
}

// addressOption reads `address <host:port> …`.
func (b blockReader) addressOption(r *Redis) func() error {
	behind := len(r.Address) > 0
	return func() error {
		switch {
		case behind:
			return b.errorf("addresses stand behind redis already: write all of them there or all here")
		case b.CountRemainingArgs() == 0:
			return b.errorf("address needs " + noAddress)
		}
		return b.moreAddresses(r)
	}
}

// setting reads an option that may be a placeholder. What is none is checked here, where its line is known.
func (b blockReader) setting(o redisOption) func() error {
	read := b.secret((*string)(o.written))
	return func() error {
		word := b.Val()
		if o.form == formSwitch && b.CountRemainingArgs() == 0 {
			*o.written = "on"
			return nil
		}
		if err := read(); err != nil {
			return err
		}
		switch text := string(*o.written); {
		case strings.Contains(text, "{http."):
			return b.errorf("%s %s", word, notOfRequest)
		case o.form == formPath && isPEM(text):
			return b.errorf("%s: %w", word, errTextAsPath)
		case !hasPlaceholder(text):
			if err := o.read(text); err != nil {
				return b.errorf("%s %q: %w", word, text, err)
			}
		}
		return nil
	}
}

// fits holds addresses and options against each other, as far as they are written here.
func (b blockReader) fits(r *Redis) error {
	if !r.isSettled() {
		return nil
	}
	s, err := r.combine(r.Address, redisOption.asWritten)
	if err == nil && r.holdsPEM() {
		_, err = s.tls.config()
	}
	if err != nil {
		return b.errorf("%w", err)
	}
	return nil
}
