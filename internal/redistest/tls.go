package redistest

import (
	"net"
	"strconv"
	"testing"

	"github.com/caddy-tollgate/ratelimit/internal/proc"
)

// TLSServer is a server with a second port that speaks TLS. Assertions, Addr and URL use the plain one.
type TLSServer struct {
	*Server
	*Certificates
	tlsPort int
}

// StartTLS starts a server as Start does, with certificates of its own and a port for TLS.
//
// It takes clients without a certificate; with the arguments "--tls-auth-clients", "yes" it wants one of its CA.
func StartTLS(t testing.TB, args ...string) *TLSServer {
	t.Helper()
	certs, port := NewCertificates(t), proc.Port(t)
	own := []string{
		"--tls-port", strconv.Itoa(port), "--tls-auth-clients", "no", "--tls-ca-cert-file", certs.CA.Path,
		"--tls-cert-file", certs.ServerCert.Path, "--tls-key-file", certs.ServerKey.Path,
	}
	return &TLSServer{Server: Start(t, append(own, args...)...), Certificates: certs, tlsPort: port}
}

// TLSAddr returns host and port where the server speaks TLS.
func (s *TLSServer) TLSAddr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(s.tlsPort)) }

// TLSURL returns that address as a rediss:// URL.
func (s *TLSServer) TLSURL() string { return redisURL("rediss", s.password, s.TLSAddr()) }
