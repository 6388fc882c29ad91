package ratelimit

import (
	"crypto/tls"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// Who may use our part of the admin endpoint: those who may use Caddy's.

// change is a request that may change something.
type change struct{ method, path, body string }

// changes are all of them, each with a body that would do.
func changes(t *testing.T) (all []change) {
	t.Helper()
	bodies := map[string]string{
		"block":    `{"zone":"a","key":"127.0.0.1","for":"1h"}`,
		"unblock":  `{"zone":"a","key":"127.0.0.1"}`,
		"inspect":  `{"zone":"a","key":"127.0.0.1"}`,
		"reset":    `{"zone":"a","key":"127.0.0.1"}`,
		"explain":  `{"method":"GET","url":"http://localhost/"}`,
		"override": `{"zone":"a","action":"allow","for":"1h"}`,
	}
	for path, methods := range adminRoutes() {
		for method := range methods {
			switch {
			case method == http.MethodPost && bodies[path] != "":
				all = append(all, change{method, "/rate_limit/" + path, bodies[path]})
			case method == http.MethodDelete:
				all = append(all, change{method, "/rate_limit/" + path + "?zone=a", ""})
			case method != http.MethodGet:
				t.Errorf("no body for %s %s", method, path)
			}
		}
	}
	return all
}

// No page of another site can change anything: what a browser sends without asking is refused, and when it asks, Caddy says no.
func TestNoChangeByAnotherSite(t *testing.T) {
	config := func(admin string) string {
		return "{\n" + admin + "\n}\nhttp://:{$PORT} {\n rate_limit {\n redis 127.0.0.1:1\n nodes 1\n zone a {\n rate 1/h\n burst 1\n}\n}\n respond ok\n}\n"
	}
	n := node.Start(t, config("admin {$ADMIN}"))
	for _, c := range changes(t) {
		for _, header := range []string{"Content-Type: text/plain", "Content-Type: application/x-www-form-urlencoded", "Content-Type: multipart/form-data; boundary=x", "X-Other: none", "Content-Type: application/json, text/plain"} {
			answer := n.Admin(c.method, c.path, c.body, header)
			if c.method == "POST" && answer.Status != http.StatusUnsupportedMediaType {
				t.Errorf("%s %s with %s: %+v", c.method, c.path, header, answer)
			}
		}
		for _, header := range []string{"Host: evil.example", "Origin: null", "Sec-Fetch-Mode: no-cors"} {
			if answer := n.Admin(c.method, c.path, c.body, "Content-Type: application/json", header); answer.Status != http.StatusForbidden && answer.Status != http.StatusBadRequest {
				t.Errorf("%s %s with %s: %+v", c.method, c.path, header, answer)
			}
		}
		if answer := n.Admin(c.method, c.path, c.body, "Content-Type: application/json", "Origin: https://evil.example"); answer.Status != http.StatusForbidden {
			t.Errorf("%s %s of another origin: %+v", c.method, c.path, answer)
		}
		if answer := n.Admin("OPTIONS", c.path, "", "Origin: https://evil.example", "Access-Control-Request-Method: "+c.method); answer.Status != http.StatusForbidden {
			t.Errorf("a browser asks whether it may %s %s: %+v", c.method, c.path, answer)
		}
	}
	if err := n.Load(config("admin {$ADMIN} {\n origins tools.example\n enforce_origin\n}")); err != nil {
		t.Fatal(err)
	}
	for _, c := range changes(t) {
		for header, want := range map[string]bool{"X-Other: no origin": false, "Origin: https://evil.example": false, "Origin: http://tools.example": true} {
			answer := n.Admin(c.method, c.path, c.body, "Host: tools.example", "Content-Type: application/json", header)
			if (answer.Status != http.StatusForbidden) != want {
				t.Errorf("%s %s with %s and enforce_origin: %+v", c.method, c.path, header, answer)
			}
		}
	}
}

// What Caddy's remote admin endpoint permits to a client certificate holds for our paths and methods.
func TestRemotePermissions(t *testing.T) {
	certs := redistest.NewCertificates(t)
	n := node.Start(t, site("", "zone a {\n rate 1/h\n burst 1\n}"))
	var config map[string]any
	if err := json.Unmarshal([]byte(n.Admin("GET", "/config/", "").Body), &config); err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode([]byte(certs.ClientCert.Text))
	address := fmt.Sprintf("127.0.0.1:%d", proc.Port(t))
	config["admin"] = map[string]any{
		"listen":   n.AdminAddr(),
		"identity": map[string]any{"identifiers": []string{"localhost"}, "issuers": []any{map[string]any{"module": "internal"}}},
		"remote": map[string]any{"listen": address, "access_control": []any{map[string]any{
			"public_keys": [][]byte{block.Bytes},
			"permissions": []any{
				map[string]any{"paths": []string{"/rate_limit/status"}, "methods": []string{"GET"}},
				map[string]any{"paths": []string{"/rate_limit/override"}, "methods": []string{"GET"}},
			},
		}}},
	}
	config["apps"].(map[string]any)["pki"] = map[string]any{"certificate_authorities": map[string]any{"local": map[string]any{"install_trust": false}}}
	body, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	if answer := n.Admin("POST", "/load", string(body)); answer.Status != 200 {
		t.Fatalf("%+v", answer)
	}
	client := remoteClient(t, certs.ClientCert, certs.ClientKey)
	status := func(client *http.Client, method, path string) int {
		request, _ := http.NewRequest(method, "https://"+address+path, strings.NewReader(`{"zone":"a","key":"1.2.3.4"}`))
		request.Header.Set("Content-Type", "application/json")
		answer, err := client.Do(request)
		if err != nil {
			return 0
		}
		defer answer.Body.Close()
		_, _ = io.Copy(io.Discard, answer.Body)
		return answer.StatusCode
	}
	proc.Eventually(t, "the remote endpoint has its certificate", func() bool { return status(client, "GET", "/rate_limit/status") == 200 })
	for _, row := range []struct {
		method, path string
		want         int
	}{
		{"GET", "/rate_limit/override", 200},
		{"POST", "/rate_limit/override", 403},
		{"DELETE", "/rate_limit/override?zone=a", 403},
		{"GET", "/rate_limit/blocks", 403},
		{"POST", "/rate_limit/status", 403},
		{"POST", "/rate_limit/inspect", 403},
		{"GET", "/rate_limit/status/../blocks", 403},
		{"GET", "/config/", 403},
	} {
		if got := status(client, row.method, row.path); got != row.want {
			t.Errorf("%s %s: status %d, want %d", row.method, row.path, got, row.want)
		}
	}
	if got := status(remoteClient(t, certs.ForeignCert, certs.ForeignKey), "GET", "/rate_limit/status"); got != 0 {
		t.Errorf("a client with another certificate: status %d", got)
	}
}

// remoteClient shows a certificate, and takes the server's for granted.
func remoteClient(t *testing.T, cert, key redistest.PEM) *http.Client {
	t.Helper()
	pair, err := tls.X509KeyPair([]byte(cert.Text), []byte(key.Text))
	if err != nil {
		t.Fatal(err)
	}
	give := func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
	transport := &http.Transport{TLSClientConfig: &tls.Config{GetClientCertificate: give, ServerName: "localhost", InsecureSkipVerify: true}} //nolint:gosec // it is the client that is tested
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: 5 * time.Second}
}
