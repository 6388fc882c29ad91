package ratelimit

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// testKeys are a CA, and a certificate with its key that it has signed for redis.internal, as PEM.
type testKeys struct {
	ca, cert, key string
	folder        string
}

func newTestKeys(t *testing.T) *testKeys {
	t.Helper()
	caKey, ca := newTestKey(t), &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test CA"}, IsCA: true, BasicConstraintsValid: true}
	key, cert := newTestKey(t), &x509.Certificate{SerialNumber: big.NewInt(2), DNSNames: []string{"redis.internal"}}
	k := &testKeys{ca: signed(t, ca, ca, caKey, caKey), cert: signed(t, cert, ca, key, caKey), folder: t.TempDir()}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	k.key = pemText("PRIVATE KEY", der)
	for name, text := range map[string]string{"ca": k.ca, "cert": k.cert, "key": k.key, "empty": ""} {
		if err := os.WriteFile(k.file(name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return k
}

func (k *testKeys) file(name string) string { return filepath.Join(k.folder, name) }

func newTestKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func signed(t *testing.T, cert, by *x509.Certificate, key, byKey *ecdsa.PrivateKey) string {
	t.Helper()
	cert.NotBefore, cert.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	der, err := x509.CreateCertificate(rand.Reader, cert, by, &key.PublicKey, byKey)
	if err != nil {
		t.Fatal(err)
	}
	return pemText("CERTIFICATE", der)
}

// pemText has no newline at its end, as what comes from a file has none.
func pemText(kind string, der []byte) string {
	return string(bytes.TrimSpace(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})))
}

// caddyfileTokens returns the words of each line.
func caddyfileTokens(config string) (lines [][]string, err error) {
	tokens, err := caddyfile.Tokenize([]byte(config), "Caddyfile")
	end := 0 // the line on which the last token ends
	for _, token := range tokens {
		if token.Line != end {
			lines = append(lines, nil)
		}
		lines[len(lines)-1] = append(lines[len(lines)-1], token.Text)
		end = token.Line + strings.Count(token.Text, "\n")
	}
	return lines, err
}

// Who may be Redis, and who may be its client, shown by a handshake.
func TestTLSHandshake(t *testing.T) {
	keys, stranger := newTestKeys(t), newTestKeys(t)
	full := tlsSettings{enabled: true, serverName: "redis.internal", ca: keys.ca, cert: keys.cert, key: keys.key}
	for why, test := range map[string]struct {
		change func(*tlsSettings)
		want   string // in the error of one side or the other
	}{
		"everything fits":           {func(*tlsSettings) {}, ""},
		"the CA is another":         {func(s *tlsSettings) { s.ca = stranger.ca }, "certificate signed by unknown authority"},
		"the CA is that of systems": {func(s *tlsSettings) { s.ca = "" }, "certificate signed by unknown authority"},
		"the name is another":       {func(s *tlsSettings) { s.serverName = "localhost" }, "not localhost"},
		"not verified":              {func(s *tlsSettings) { s.ca, s.serverName, s.insecure = "", "localhost", true }, ""},
		"no client certificate":     {func(s *tlsSettings) { s.cert, s.key = "", "" }, "certificate required"},
		"an unknown client":         {func(s *tlsSettings) { s.cert, s.key = stranger.cert, stranger.key }, "certificate"},
	} {
		s := full
		test.change(&s)
		config, err := s.config()
		if err != nil {
			t.Fatalf("%s: %v", why, err)
		}
		err = handshake(t, keys, config, tls.VersionTLS13)
		if test.want == "" && err != nil || test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)) {
			t.Errorf("%s: got %v, want %q", why, err, test.want)
		}
	}
	config, err := full.config()
	if err != nil {
		t.Fatal(err)
	}
	if err := handshake(t, keys, config, tls.VersionTLS12); err != nil {
		t.Errorf("TLS 1.2: %v", err)
	}
	if err := handshake(t, keys, config, tls.VersionTLS11); err == nil {
		t.Error("TLS 1.1 is spoken")
	}
}

// handshake connects to a server that asks for a certificate, reads a byte from it, and returns what failed.
func handshake(t *testing.T, keys *testKeys, client *tls.Config, version uint16) error {
	t.Helper()
	pair, err := tls.X509KeyPair([]byte(keys.cert), []byte(keys.key))
	if err != nil {
		t.Fatal(err)
	}
	ca := x509.NewCertPool()
	ca.AppendCertsFromPEM([]byte(keys.ca))
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go func() {
		there, err := listener.Accept()
		if err != nil {
			return
		}
		defer there.Close()
		server := tls.Server(there, &tls.Config{
			Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: ca,
			MinVersion: tls.VersionTLS10, MaxVersion: version,
		})
		_, _ = server.Write([]byte("x")) // if that fails, the client has an error too
	}()
	here, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	_ = here.SetDeadline(time.Now().Add(10 * time.Second))
	_, err = tls.Client(here, client).Read(make([]byte, 1))
	return err
}

// Without TLS there is no configuration, and what is no certificate or does not fit is found before anything is connected.
func TestTLSConfig(t *testing.T) {
	keys, other := newTestKeys(t), newTestKeys(t)
	noKey := "-----BEGIN PRIVATE KEY-----\naHVudGVyMg==\n-----END PRIVATE KEY-----"
	for why, test := range map[string]struct {
		tls  tlsSettings
		want string // the beginning of the error
	}{
		"nothing":           {tlsSettings{enabled: true}, ""},
		"all":               {tlsSettings{enabled: true, ca: keys.ca, cert: keys.cert, key: keys.key}, ""},
		"CA is no PEM":      {tlsSettings{enabled: true, ca: "hunter2"}, "tls_server_certs holds no certificate: it must be PEM"},
		"CA is a key":       {tlsSettings{enabled: true, ca: keys.key}, "tls_server_certs holds no certificate: it must be PEM"},
		"cert is no PEM":    {tlsSettings{enabled: true, cert: "hunter2", key: keys.key}, "tls_client_cert and tls_client_key must be PEM and belong together"},
		"key is no PEM":     {tlsSettings{enabled: true, cert: keys.cert, key: "hunter2"}, "tls_client_cert and tls_client_key must be PEM and belong together"},
		"key is no key":     {tlsSettings{enabled: true, cert: keys.cert, key: noKey}, "tls_client_cert and tls_client_key must be PEM and belong together"},
		"key and cert swap": {tlsSettings{enabled: true, cert: keys.key, key: keys.cert}, "tls_client_cert and tls_client_key must be PEM and belong together"},
		"key of another":    {tlsSettings{enabled: true, cert: keys.cert, key: other.key}, "tls_client_cert and tls_client_key must be PEM and belong together: tls: private key does not match public key"},
	} {
		config, err := test.tls.config()
		switch {
		case test.want == "" && (err != nil || config.MinVersion != tls.VersionTLS12 || config.InsecureSkipVerify):
			t.Errorf("%s: got %+v, %v", why, config, err)
		case test.want != "" && (err == nil || !strings.HasPrefix(err.Error(), test.want)):
			t.Errorf("%s: got %v, want %s", why, err, test.want)
		case err != nil && (strings.Contains(err.Error(), "hunter2") || strings.Contains(err.Error(), "aHVudGVyMg") || strings.Contains(err.Error(), strings.Split(keys.key, "\n")[1])):
			t.Errorf("%s: the error shows a secret: %v", why, err)
		}
	}
	if config, err := (&tlsSettings{}).config(); config != nil || err != nil {
		t.Errorf("without TLS: got %v, %v", config, err)
	}
}

// Files are read when the configuration loads, and equal content is the same connection, wherever it comes from.
func TestTLSFiles(t *testing.T) {
	keys := newTestKeys(t)
	config := func(ca string) *Redis {
		return readRedis(t, `{"address":["rediss://a:1"],"tls_server_certs_path":"`+ca+`","tls_client_cert_path":"`+keys.file("cert")+`","tls_client_key_path":"`+keys.file("key")+`"`)
	}
	files, err := config(keys.file("ca")).settings()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("TOLLGATE_TEST_CA", keys.ca)
	texts := config("/")
	texts.TLSServerCertsPath, texts.TLSServerCertsPEM = "", "{env.TOLLGATE_TEST_CA}"
	if same, err := texts.settings(); err != nil || same != files {
		t.Errorf("got %+v, %v, want %+v", same, err, files)
	}
	for file, want := range map[string]string{
		keys.file("missing"): "redis: tls_server_certs_path: reading the file: no such file or directory",
		keys.file("empty"):   "redis: tls_server_certs_path: reading the file: it is empty",
		keys.folder:          "redis: tls_server_certs_path: reading the file: is a directory",
		keys.file("key"):     "redis: tls_server_certs holds no certificate: it must be PEM, -----BEGIN CERTIFICATE----- and so on; a file is named by tls_server_certs_path",
	} {
		if _, err := config(file).settings(); err == nil || err.Error() != want {
			t.Errorf("%s: got %v, want %s", file, err, want)
		}
	}
	if err := os.WriteFile(keys.file("ca"), []byte(newTestKeys(t).ca), 0o600); err != nil {
		t.Fatal(err)
	}
	if renewed, err := config(keys.file("ca")).settings(); err != nil || renewed == files {
		t.Errorf("another CA in the same file is the same connection: %v", err)
	}
}
