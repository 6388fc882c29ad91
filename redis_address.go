package ratelimit

// This file reads addresses of Redis. Errors never repeat one: it can hold a password, or be one by mistake.

import (
	"errors"
	"net"
	"net/url"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"
)

var (
	errAddressMissing = errors.New("an address is missing: write host:port, or a URL like redis://host:6379/0, or redis off")
	errNoPort         = errors.New("the address has no port: write host:port, or a URL like redis://host:6379/0")
	errEmptyHost      = errors.New("the address has no host: perhaps an environment variable is empty; write host:port")
	errNoHost         = errors.New("the address is more than host:port: write user and password as username and password, or as a URL like redis://user:password@host:6379/0")
	errSeveral        = errors.New("with several addresses, write each as host:port, and what else stands in a URL as username, password, db and tls_enabled")
	errURL            = errors.New("the URL cannot be parsed; write it like redis://user:password@host:6379/0, special characters in the password as %XX")
	errURLForm        = errors.New("the URL must be like redis://user:password@host:6379/0 or unix:///run/redis.sock?db=0, with the number of a database")
	errScheme         = errors.New("the URL must begin with redis://, rediss:// or unix://")
	errParameter      = errors.New("the URL has parameters; only unix:///run/redis.sock?db=0 has one: write others as options, and a ? in a password as %3F")
)

// dial reads the addresses into the settings. It returns the options that a URL has answered.
func (s *redisSettings) dial(addresses []string) (inURL map[string]bool, err error) {
	if len(addresses) == 1 && strings.Contains(addresses[0], "://") {
		return s.dialURL(addresses[0])
	}
	var all []string
	for _, address := range addresses {
		if strings.Contains(address, "://") {
			return nil, errSeveral
		}
		for one := range strings.SplitSeq(address, ",") {
			all = append(all, strings.TrimSpace(one))
		}
	}
	for _, address := range all {
		if err := checkHostPort(address); err != nil {
			return nil, err
		}
	}
	if len(all) == 0 {
		return nil, errAddressMissing
	}
	s.network, s.addresses = "tcp", strings.Join(all, ",")
	return nil, nil
}

func checkHostPort(address string) error {
	host, port, err := net.SplitHostPort(address)
	if _, notANumber := strconv.ParseUint(port, 10, 16); err != nil || notANumber != nil {
		return errNoPort
	}
	if host == "" {
		return errEmptyHost
	}
	if strings.ContainsAny(host, "@/") { // would show in logs as the name of a server
		return errNoHost
	}
	return nil
}

func (s *redisSettings) dialURL(address string) (inURL map[string]bool, err error) {
	u, err := url.Parse(address)
	if err != nil || u.Fragment != "" {
		return nil, errURL
	}
	if err := checkURL(u); err != nil {
		return nil, err
	}
	o, err := redis.ParseURL(address)
	if err != nil || o.DB < 0 {
		return nil, errURLForm
	}
	if o.Network == "tcp" && checkHostPort(o.Addr) != nil {
		return nil, errURLForm
	}
	s.network, s.addresses, s.username, s.password, s.db = o.Network, o.Addr, o.Username, o.Password, o.DB
	s.tls.enabled = o.TLSConfig != nil
	hasDB := u.Query().Has("db") || o.Network == "tcp" && strings.Trim(u.Path, "/") != ""
	return map[string]bool{"username": o.Username != "", "password": o.Password != "", "db": hasDB}, nil
}

func checkURL(u *url.URL) error {
	switch u.Scheme {
	case "redis", "rediss":
	case "unix":
		if u.Host != "" {
			return errURLForm
		}
	default:
		return errScheme
	}
	for name := range u.Query() {
		if u.Scheme != "unix" || name != "db" {
			return errParameter
		}
	}
	return nil
}

// addressList returns the addresses one by one.
func (s *redisSettings) addressList() []string {
	if s.network == "unix" { // a path may hold a comma
		return []string{s.addresses}
	}
	return strings.Split(s.addresses, ",")
}

// literalPassword says whether an address holds a password that is no placeholder. Other parts of it may be placeholders, with
// which it is no URL yet.
func (r *Redis) literalPassword() bool {
	for _, address := range r.Address {
		_, rest, _ := strings.Cut(address, "://")
		_, password, _ := strings.Cut(rest[:max(strings.LastIndexByte(rest, '@'), 0)], ":")
		if isOpen(password) {
			return true
		}
	}
	return false
}
