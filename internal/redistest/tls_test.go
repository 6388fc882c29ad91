package redistest

import (
	"crypto/tls"
	"crypto/x509"
	"testing"

	"github.com/redis/go-redis/v9"
)

func TestTLSServerAnswersWhoKnowsItsCA(t *testing.T) {
	t.Parallel()
	s := StartTLS(t)
	if err := pingTLS(t, s.TLSAddr(), clientConfig(t, s.CA)); err != nil {
		t.Errorf("with its CA: %v", err)
	}
	if err := pingTLS(t, s.TLSAddr(), clientConfig(t, s.ForeignCA)); err == nil {
		t.Error("with another CA: no error")
	}
	byName := clientConfig(t, s.CA)
	byName.ServerName = "localhost"
	if err := pingTLS(t, s.TLSAddr(), byName); err != nil {
		t.Errorf("as localhost: %v", err)
	}
	byName.ServerName = "elsewhere.example"
	if err := pingTLS(t, s.TLSAddr(), byName); err == nil {
		t.Error("as another host: no error")
	}
	if err := pingTLS(t, NewProxy(t, s.TLSAddr()).Addr(), clientConfig(t, s.CA)); err != nil {
		t.Errorf("through a proxy: %v", err)
	}
}

func TestTLSServerThatWantsCertificates(t *testing.T) {
	t.Parallel()
	s := StartTLS(t, "--tls-auth-clients", "yes", "--requirepass", "secret")
	if got := s.Do("ping"); got != "PONG" {
		t.Errorf("ping on the plain port: got %v", got)
	}
	if want := "rediss://:secret@" + s.TLSAddr(); s.TLSURL() != want {
		t.Errorf("URL: got %s, want %s", s.TLSURL(), want)
	}
	config := clientConfig(t, s.CA)
	if err := pingTLS(t, s.TLSAddr(), config); err == nil {
		t.Error("without a certificate: no error")
	}
	config.Certificates = []tls.Certificate{keyPair(t, s.ForeignCert, s.ForeignKey)}
	if err := pingTLS(t, s.TLSAddr(), config); err == nil {
		t.Error("with a certificate of another CA: no error")
	}
	config.Certificates = []tls.Certificate{keyPair(t, s.ClientCert, s.ClientKey)}
	if err := pingTLS(t, s.TLSAddr(), config); err != nil {
		t.Errorf("with its certificate: %v", err)
	}
}

// The files hold what the texts say, and the texts what the files say.
func TestCertificatesAsFiles(t *testing.T) {
	t.Parallel()
	certs := NewCertificates(t)
	if _, err := tls.LoadX509KeyPair(certs.ClientCert.Path, certs.ClientKey.Path); err != nil {
		t.Error(err)
	}
	if _, err := tls.X509KeyPair([]byte(certs.ServerCert.Text), []byte(certs.ServerKey.Text)); err != nil {
		t.Error(err)
	}
}

func clientConfig(t *testing.T, ca PEM) *tls.Config {
	t.Helper()
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM([]byte(ca.Text)) {
		t.Fatal("no certificate in the PEM of the CA")
	}
	return &tls.Config{RootCAs: pool, ServerName: "127.0.0.1"}
}

func keyPair(t *testing.T, cert, key PEM) tls.Certificate {
	t.Helper()
	pair, err := tls.X509KeyPair([]byte(cert.Text), []byte(key.Text))
	if err != nil {
		t.Fatal(err)
	}
	return pair
}

// pingTLS returns an error only if there was no TLS; a server that wants a password is content with the certificates.
func pingTLS(t *testing.T, addr string, config *tls.Config) error {
	t.Helper()
	options := quiet("rediss://:secret@" + addr)
	options.TLSConfig = config.Clone()
	options.MaxRetries = -1
	client := redis.NewClient(options)
	defer client.Close()
	return client.Ping(t.Context()).Err()
}
