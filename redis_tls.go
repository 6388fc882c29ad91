package ratelimit

// This file makes a TLS configuration of certificates and keys. Errors never repeat them.

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strings"
	"syscall"
	"time"
)

// tlsSettings say how a connection is encrypted, and who is let to be Redis. They are comparable by content, so that a new
// certificate in an old file is another connection.
type tlsSettings struct {
	enabled, insecure bool
	serverName        string
	ca, cert, key     string // PEM
}

// config returns what the settings mean, nil without TLS. Without a server name it is that of the host which is connected to.
func (t *tlsSettings) config() (*tls.Config, error) {
	if !t.enabled {
		return nil, nil
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: t.serverName, InsecureSkipVerify: t.insecure}
	if t.ca != "" {
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM([]byte(t.ca)) {
			return nil, errors.New("tls_server_certs holds no certificate: it must be PEM, -----BEGIN CERTIFICATE----- and so on; a file is named by tls_server_certs_path")
		}
	}
	if t.cert != "" {
		pair, err := tls.X509KeyPair([]byte(t.cert), []byte(t.key))
		if err != nil {
			return nil, fmt.Errorf("tls_client_cert and tls_client_key must be PEM and belong together: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}

// tlsKeepAlive is how often the other side of an idle connection is asked for: more often than what stands between forgets it.
const tlsKeepAlive = time.Minute

// dialer returns a function that opens encrypted connections, nil without TLS: go-redis opens others well.
func (t *tlsSettings) dialer() func(ctx context.Context, network, addr string) (net.Conn, error) {
	config, err := t.config()
	if err != nil {
		panic(err) // it was checked when the configuration was loaded
	}
	if config == nil {
		return nil
	}
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, dialTimeout)
		defer cancel()
		conn, err := (&tls.Dialer{NetDialer: &net.Dialer{KeepAlive: tlsKeepAlive}, Config: config}).DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		if err := greet(ctx, conn); err != nil {
			conn.Close()
			return nil, err
		}
		return openConn{conn.(*tls.Conn)}, nil
	}
}

// greet waits until a server has answered once, whatever it says: then nothing is left of what it sends by itself at the beginning
// of TLS, its tickets.
func greet(ctx context.Context, conn net.Conn) error {
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		return err
	}
	if _, err := conn.Write([]byte("PING\r\n")); err != nil {
		return err
	}
	for answer := make([]byte, 512); ; {
		n, err := conn.Read(answer)
		if err != nil {
			return err
		}
		if n > 0 && answer[n-1] == '\n' {
			return conn.SetDeadline(time.Time{})
		}
	}
}

// openConn is an encrypted connection that can be seen to be closed by the other side. Before go-redis uses one that was idle, it
// looks at the socket for its end, and for what came unasked, which is an end as well. It does not look into a tls.Conn: a request
// would be sent where nobody reads it, and one whose answer does not come is never sent again.
type openConn struct{ *tls.Conn }

// SyscallConn implements syscall.Conn.
func (c openConn) SyscallConn() (syscall.RawConn, error) {
	socket, ok := c.NetConn().(syscall.Conn)
	if !ok {
		return nil, errors.ErrUnsupported
	}
	return socket.SyscallConn()
}

// check refuses what would be ignored.
func (t *tlsSettings) check() error {
	switch {
	case t.enabled && t.cert != "" && t.key == "":
		return errors.New("tls_client_cert needs its key: write tls_client_key_path or tls_client_key_pem")
	case t.enabled && t.cert == "" && t.key != "":
		return errors.New("tls_client_key needs its certificate: write tls_client_cert_path or tls_client_cert_pem")
	case !t.enabled && *t != tlsSettings{}:
		return errors.New("there are tls_ options, but TLS is off: write tls_enabled or a URL that begins with rediss://, or leave them out")
	}
	return nil
}

var errTextAsPath = errors.New("this is the text of a certificate or a key, not the path of a file: write the option that ends with _pem")

// readPEM returns the content of a file. Its path may be a secret by mistake.
func readPEM(path string) (string, error) {
	if isPEM(path) {
		return "", errTextAsPath
	}
	content, err := os.ReadFile(path)
	if failure := new(fs.PathError); errors.As(err, &failure) {
		err = failure.Err
	}
	if err == nil && len(content) == 0 {
		err = errors.New("it is empty")
	}
	if err != nil {
		return "", fmt.Errorf("reading the file: %w", err)
	}
	return string(content), nil
}

func isPEM(text string) bool { return strings.Contains(text, "-----BEGIN") }
