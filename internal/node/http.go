package node

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"syscall"
)

// Response is an answer that was read to its end.
type Response struct {
	Status int
	Header http.Header
	Body   string
}

// Addr returns host and port of the node's site.
func (n *Node) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(n.port)) }

// AdminAddr returns host and port of the node's admin endpoint.
func (n *Node) AdminAddr() string { return n.admin }

// URL returns the address of a path on the node's site.
func (n *Node) URL(path string) string { return "http://" + n.Addr() + path }

// Get gets a path of the node's site. Headers are written like "Accept: text/html"; Host is one of them. No answer
// fails the test.
func (n *Node) Get(path string, headers ...string) *Response {
	n.t.Helper()
	response, err := n.Try(http.MethodGet, path, "", headers...)
	if err != nil {
		n.t.Fatal(err)
	}
	return response
}

// Try sends any request to the node's site. Redirects are not followed. It may be called from any goroutine, and while
// the node is down.
func (n *Node) Try(method, path, body string, headers ...string) (*Response, error) {
	return n.send(method, n.URL(path), body, headers)
}

func (n *Node) send(method, address, body string, headers []string) (*Response, error) {
	request, err := http.NewRequest(method, address, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	for _, header := range headers {
		name, value, ok := strings.Cut(header, ":")
		if !ok {
			return nil, fmt.Errorf("header %q has no colon", header)
		}
		request.Header.Add(name, strings.TrimSpace(value))
	}
	request.Host = request.Header.Get("Host")
	// The admin endpoint is replaced on every load, and with it the connections that are kept open.
	request.Close = request.URL.Host == n.admin
	response, err := n.do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	content, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, fmt.Errorf("reading the answer to %s %s: %w", method, address, err)
	}
	return &Response{Status: response.StatusCode, Header: response.Header, Body: string(content)}, nil
}

// do sends a request, and again what can be repeated, a GET or a load, if its connection was closed without an answer. Caddy on
// Linux has the listeners of the old and of the new configuration open for a moment; who is in the queue of the old one when it
// closes is not served.
func (n *Node) do(request *http.Request) (response *http.Response, err error) {
	repeatable := request.Method == http.MethodGet || request.URL.Host == n.admin && request.URL.Path == "/load"
	for range 5 {
		if request.Body, err = request.GetBody(); err != nil {
			return nil, err
		}
		response, err = n.client.Do(request)
		closed := errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)
		if !closed || !repeatable {
			break
		}
	}
	return response, err
}

// Admin sends a request to the node's admin endpoint. A body is JSON if the headers do not say something else. No
// answer fails the test.
func (n *Node) Admin(method, path, body string, headers ...string) *Response {
	n.t.Helper()
	if len(headers) == 0 && body != "" {
		headers = []string{"Content-Type: application/json"}
	}
	response, err := n.send(method, "http://"+n.admin+path, body, headers)
	if err != nil {
		n.t.Fatal(err)
	}
	return response
}

// Load replaces the node's configuration by a Caddyfile. An equal one is loaded again, too. The error is what Caddy
// answered; then the old configuration is still there.
func (n *Node) Load(caddyfile string) error {
	n.t.Helper()
	answer := n.Admin(http.MethodPost, "/load", caddyfile, "Content-Type: text/caddyfile", "Cache-Control: must-revalidate")
	if answer.Status != http.StatusOK {
		return fmt.Errorf("loading the Caddyfile: status %d: %s", answer.Status, answer.Body)
	}
	return nil
}

// Patch replaces the value at a path of the node's configuration, like "apps/http/servers/srv0/listen", by JSON.
func (n *Node) Patch(path, value string) (status int, body string) {
	n.t.Helper()
	answer := n.Admin(http.MethodPatch, (&url.URL{Path: "/config/" + strings.TrimPrefix(path, "/")}).EscapedPath(), value)
	return answer.Status, answer.Body
}
