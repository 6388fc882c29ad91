package bench

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
)

// responses reads what a server answers on one connection: status and length, no more, since every microsecond here is one
// that the server does not have.
type responses struct {
	from io.Reader
	buf  [16 << 10]byte
	have int // bytes in buf that were not consumed
}

var (
	endOfHead     = []byte("\r\n\r\n")
	contentLength = []byte("\r\ncontent-length:")
	chunked       = []byte("\r\ntransfer-encoding:")

	// errLength is an answer of which the reader cannot tell where it ends.
	errLength = errors.New("the answer has no Content-Length")
)

// next reads an answer to its end and returns its status.
func (r *responses) next() (status int, err error) {
	head, err := r.head()
	if err != nil {
		return 0, err
	}
	status, length, err := parseHead(r.buf[:head])
	if err != nil {
		return 0, err
	}
	return status, r.discard(head + length)
}

// head reads until the empty line is there and returns where the body begins.
func (r *responses) head() (int, error) {
	searched := 0
	for {
		if i := bytes.Index(r.buf[searched:r.have], endOfHead); i >= 0 {
			return searched + i + len(endOfHead), nil
		}
		searched = max(r.have-len(endOfHead)+1, 0)
		if r.have == len(r.buf) {
			return 0, errors.New("the head of the answer is too long")
		}
		n, err := r.from.Read(r.buf[r.have:])
		if r.have += n; n == 0 && err != nil {
			return 0, err
		}
	}
}

// discard consumes so many bytes, and reads those of them that are not there yet.
func (r *responses) discard(length int) error {
	for r.have < length {
		length -= r.have
		n, err := r.from.Read(r.buf[:])
		if r.have = n; n == 0 && err != nil {
			return err
		}
	}
	r.have = copy(r.buf[:], r.buf[length:r.have])
	return nil
}

func parseHead(head []byte) (status, length int, err error) {
	if len(head) < len("HTTP/1.1 200") || !bytes.HasPrefix(head, []byte("HTTP/1.1 ")) {
		return 0, 0, fmt.Errorf("no answer of HTTP/1.1: %.40q", head)
	}
	if status, err = strconv.Atoi(string(head[9:12])); err != nil {
		return 0, 0, fmt.Errorf("reading the status: %w", err)
	}
	value, ok := header(head, contentLength)
	if !ok {
		bodiless := status == 204 || status == 304
		if _, more := header(head, chunked); more || !bodiless {
			return 0, 0, errLength
		}
		return status, 0, nil
	}
	length, err = strconv.Atoi(string(value))
	if err != nil || length < 0 {
		return 0, 0, fmt.Errorf("reading the Content-Length: got %q", value)
	}
	return status, length, nil
}

// header finds a line of the head by its beginning, which is in small letters.
func header(head, name []byte) (value []byte, ok bool) {
	for rest := head; ; {
		i := bytes.IndexByte(rest, '\r')
		if i < 0 || len(rest)-i < len(name) {
			return nil, false
		}
		if rest = rest[i:]; bytes.EqualFold(rest[:len(name)], name) {
			value, _, _ = bytes.Cut(rest[len(name):], endOfHead[:2])
			return bytes.TrimSpace(value), true
		}
		rest = rest[1:]
	}
}
