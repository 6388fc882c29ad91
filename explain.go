package ratelimit

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// This file says what would become of a request: it makes one up as a server would have it, and sends it along the routes. Which
// way that is, is in explain_routes.go; what a limit would say, in explain_limits.go.

const explainHelp = `{"method": "GET", "url": "https://example.com/login", "headers": {"Name": ["value"]}, "client_ip": "203.0.113.7"}`

func explain(ctx context.Context, _ *App, r *http.Request) (any, error) {
	asked, err := readRequest[explainRequest](r, explainHelp)
	if err != nil {
		return nil, err
	}
	app, err := caddy.ActiveContext().AppIfConfigured("http")
	if err != nil {
		return nil, adminError(http.StatusNotFound, "no http app in the configuration that is served: %w", err)
	}
	made, local, err := asked.request()
	if err != nil {
		return nil, adminError(http.StatusBadRequest, "%w; write %s", err, explainHelp)
	}
	name, server, err := serverFor(app.(*caddyhttp.App), made.URL)
	if err != nil {
		return nil, adminError(http.StatusBadRequest, "%w", err)
	}
	// Placeholders of the local address need one in the context; nothing else of the admin endpoint's request belongs there.
	made = made.WithContext(context.WithValue(context.WithoutCancel(context.Background()), http.LocalAddrContextKey, local))
	e := newExplanation(ctx, name, server, made)
	e.follow(server.Routes)
	if e.err != nil {
		return nil, adminError(http.StatusServiceUnavailable, "%w", e.err)
	}
	return e.info, nil
}

// request makes up the request, as a server has read it, and the address at which it would have come in.
func (e *explainRequest) request() (*http.Request, net.Addr, error) {
	u, err := url.Parse(e.URL)
	if err != nil {
		return nil, nil, err
	}
	if u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" {
		return nil, nil, fmt.Errorf("url: must be http or https, with a host, got %q", e.URL)
	}
	client := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	if e.ClientIP != "" {
		if client, err = netip.ParseAddr(e.ClientIP); err != nil {
			return nil, nil, fmt.Errorf("client_ip: must be an address, got %q", e.ClientIP)
		}
	}
	r, err := http.NewRequest(e.Method, e.URL, http.NoBody)
	if err != nil {
		return nil, nil, err
	}
	r.RequestURI, r.RemoteAddr = u.RequestURI(), net.JoinHostPort(client.String(), "0")
	for name, values := range e.Headers {
		for _, value := range values {
			r.Header.Add(name, value)
		}
	}
	if host := r.Header.Get("Host"); host != "" {
		r.Host = host
	}
	r.Header.Del("Host")
	if u.Scheme == "https" {
		r.TLS = &tls.ConnectionState{HandshakeComplete: true, Version: tls.VersionTLS13, ServerName: u.Hostname()}
	}
	return r, &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: int(portOf(u))}, nil
}

func portOf(u *url.URL) uint {
	if port, err := strconv.ParseUint(u.Port(), 10, 16); err == nil {
		return uint(port)
	}
	if u.Scheme == "https" {
		return 443
	}
	return 80
}

// serverFor returns the server that a request to a URL reaches. That a name leads to this machine is taken for granted.
func serverFor(app *caddyhttp.App, u *url.URL) (string, *caddyhttp.Server, error) {
	best, found := noListener, ""
	var listeners []string
	for _, name := range sortedNames(app.Servers) {
		for _, listen := range app.Servers[name].Listen {
			addr, err := caddy.ParseNetworkAddress(listen)
			if err != nil {
				continue
			}
			scheme := schemeAt(app, app.Servers[name], addr)
			listeners = append(listeners, fmt.Sprintf("%s %s at %s", name, scheme, addr))
			if fit := fits(addr, scheme, u); fit > best {
				best, found = fit, name
			}
		}
	}
	if best == noListener {
		return "", nil, fmt.Errorf("no server listens for %s at port %d; there are: %s", u.Scheme, portOf(u), strings.Join(listeners, ", "))
	}
	return found, app.Servers[found], nil
}

// schemeAt returns the scheme that a server speaks at an address, as Caddy decides that.
func schemeAt(app *caddyhttp.App, s *caddyhttp.Server, addr caddy.NetworkAddress) string {
	httpPort := uint(caddyhttp.DefaultHTTPPort)
	if app.HTTPPort > 0 {
		httpPort = uint(app.HTTPPort)
	}
	if len(s.TLSConnPolicies) > 0 && addr.StartPort != httpPort {
		return "https"
	}
	return "http"
}

// listenerFit says how well a listener fits a URL, worst first.
type listenerFit int

const (
	noListener listenerFit = iota
	// behindProxy is one without a port: what is in front of it has the port.
	behindProxy
	// otherHost is at the right port of one address, to which the host of the URL may lead.
	otherHost
	anyHost
	sameHost
)

func fits(addr caddy.NetworkAddress, scheme string, u *url.URL) listenerFit {
	if addr.IsUnixNetwork() || addr.IsFdNetwork() {
		return behindProxy
	}
	port := portOf(u)
	if scheme != u.Scheme || port < addr.StartPort || port > addr.EndPort {
		return noListener
	}
	here, err := netip.ParseAddr(addr.Host)
	asked, notIP := netip.ParseAddr(u.Hostname())
	switch {
	case addr.Host == "", err == nil && here.IsUnspecified():
		return anyHost
	case strings.EqualFold(addr.Host, u.Hostname()), err == nil && notIP == nil && here == asked:
		return sameHost
	case err == nil && notIP == nil:
		return noListener
	}
	return otherHost
}
