package redistest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// PEM is a certificate or a key, as text and in a file.
type PEM struct {
	Text, Path string
}

// Certificates are those of a server and its client, both signed by the CA, and what a stranger has: a CA of the same
// name that signed none of them, and a client certificate by that one.
type Certificates struct {
	CA                      PEM
	ServerCert, ServerKey   PEM // for 127.0.0.1 and localhost
	ClientCert, ClientKey   PEM
	ForeignCA               PEM
	ForeignCert, ForeignKey PEM
}

// NewCertificates makes certificates that are valid for an hour, in a folder that is removed when the test ends.
func NewCertificates(t testing.TB) *Certificates {
	t.Helper()
	m := &mint{t: t, dir: t.TempDir()}
	ca, foreign := m.authority("ca"), m.authority("foreign-ca")
	certs := &Certificates{CA: ca.certFile, ForeignCA: foreign.certFile}
	server, client, stranger := m.issue("server", ca), m.issue("client", ca), m.issue("foreign", foreign)
	certs.ServerCert, certs.ServerKey = server.certFile, server.keyFile
	certs.ClientCert, certs.ClientKey = client.certFile, client.keyFile
	certs.ForeignCert, certs.ForeignKey = stranger.certFile, stranger.keyFile
	return certs
}

// mint makes certificates and counts them: serial numbers have to differ.
type mint struct {
	t      testing.TB
	dir    string
	serial int64
}

// pair is a certificate with its key.
type pair struct {
	cert              *x509.Certificate
	key               *ecdsa.PrivateKey
	certFile, keyFile PEM
}

func (m *mint) authority(name string) *pair {
	m.t.Helper()
	return m.sign(name, &x509.Certificate{
		Subject: pkix.Name{CommonName: "redistest CA"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign,
	}, nil)
}

func (m *mint) issue(name string, by *pair) *pair {
	m.t.Helper()
	return m.sign(name, &x509.Certificate{
		Subject:     pkix.Name{CommonName: name},
		DNSNames:    []string{"localhost"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, by)
}

// sign completes the certificate and has it signed, by itself if by nobody else.
func (m *mint) sign(name string, template *x509.Certificate, by *pair) *pair {
	m.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		m.t.Fatal(err)
	}
	m.serial++
	template.SerialNumber = big.NewInt(m.serial)
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Minute), time.Now().Add(time.Hour)
	made := &pair{cert: template, key: key}
	if by == nil {
		by = made
	}
	der, err := x509.CreateCertificate(rand.Reader, template, by.cert, &key.PublicKey, by.key)
	if err != nil {
		m.t.Fatal(err)
	}
	if made.cert, err = x509.ParseCertificate(der); err != nil {
		m.t.Fatal(err)
	}
	made.certFile, made.keyFile = m.write(name+".crt", "CERTIFICATE", der), m.writeKey(name+".key", key)
	return made
}

func (m *mint) writeKey(name string, key *ecdsa.PrivateKey) PEM {
	m.t.Helper()
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		m.t.Fatal(err)
	}
	return m.write(name, "PRIVATE KEY", der)
}

func (m *mint) write(name, kind string, der []byte) PEM {
	m.t.Helper()
	text := pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
	path := filepath.Join(m.dir, name)
	if err := os.WriteFile(path, text, 0o600); err != nil {
		m.t.Fatal(err)
	}
	return PEM{Text: string(text), Path: path}
}
