package ratelimit

import (
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
)

// This file tells the backend what a dry run would have refused, in a request header that no client can write or remove.

// takenHeaders are the headers that no mark may replace: what HTTP and proxies need, what says who the client is, and our own.
var takenHeaders = []string{
	"Connection", "Keep-Alive", "Proxy-Connection", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
	"Host", "Content-Length", "Content-Type", "Content-Encoding", "Expect", "Authorization", "Cookie",
	"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto",
	headerLimit, headerRemaining, headerReset, headerReason, headerRetry,
}

// markForm is what the name of a header may be: a token (RFC 9110).
var markForm = regexp.MustCompile("^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}$")

// checkMarkName says what is wrong with the name of a header for marks.
func checkMarkName(name string) error {
	switch {
	case !markForm.MatchString(name):
		return errors.New("the name of a header is 1 to 64 letters, digits and any of !#$%&'*+-.^_`|~")
	case slices.ContainsFunc(takenHeaders, func(taken string) bool { return sameHeader(taken, name) }):
		return errors.New("the header has a meaning of its own: invent one, like X-Dry-Run")
	}
	return nil
}

// provisionMarks checks the name, and puts it into the form in which net/http keeps it.
func (h *Handler) provisionMarks() error {
	if h.DryRunHeader == "" {
		return nil
	}
	if err := checkMarkName(h.DryRunHeader); err != nil {
		return fmt.Errorf("dry_run_header %q: %w", h.DryRunHeader, err)
	}
	h.marks = http.CanonicalHeaderKey(h.DryRunHeader)
	return nil
}

// sameHeader says whether a backend may take one name of a header for the other: CGI, and what descends from it, makes one
// underscore of whatever is no letter.
func sameHeader(a, b string) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range len(a) {
		if a[i] != b[i] && headerLetter(a[i]) != headerLetter(b[i]) {
			return false
		}
	}
	return true
}

func headerLetter(c byte) byte {
	switch {
	case c >= 'A' && c <= 'Z':
		return c + 'a' - 'A'
	case c >= 'a' && c <= 'z', c >= '0' && c <= '9':
		return c
	}
	return '_'
}

// clearMarks removes what a client wrote as if it were a mark. The marks of a handler before this one stay.
func (h *Handler) clearMarks(r *http.Request) {
	name := h.marks
	if name == "" {
		return
	}
	p := progressOf(r)
	if slices.Contains(p.marks, name) {
		return
	}
	p.marks = append(p.marks, name)
	for written := range r.Header {
		if sameHeader(written, name) {
			delete(r.Header, written)
		}
	}
	keepMark(r.Header, name)
}

// keepMark takes the name off Connection: what stands there is removed by the next proxy, which would hide the mark.
func keepMark(h http.Header, name string) {
	var kept []string
	for _, line := range h["Connection"] {
		options := strings.Split(line, ",")
		options = slices.DeleteFunc(options, func(option string) bool { return sameHeader(strings.TrimSpace(option), name) })
		if len(options) > 0 {
			kept = append(kept, strings.Join(options, ","))
		}
	}
	if kept != nil {
		h["Connection"] = kept
	} else {
		delete(h, "Connection")
	}
}

// mark tells the backend that a dry run would have refused the request: in a list of structured fields (RFC 9651), like
// `overloaded, limited;zone="api"`.
func (h *Handler) mark(r *http.Request, reason Reason, zone string) {
	if h.marks == "" {
		return
	}
	mark := string(reason)
	if zone != "" {
		mark += `;zone=` + quotedField(zone)
	}
	if before := r.Header[h.marks]; len(before) > 0 {
		mark = before[0] + ", " + mark
	}
	r.Header[h.marks] = []string{mark}
}

// quotedField returns text as a string of a structured field, which holds nothing but ASCII.
func quotedField(text string) string {
	quoted := []byte{'"'}
	for i := range len(text) {
		switch c := text[i]; {
		case c == '"' || c == '\\':
			quoted = append(quoted, '\\', c)
		case c < ' ' || c > '~':
			quoted = append(quoted, '?')
		default:
			quoted = append(quoted, c)
		}
	}
	return string(append(quoted, '"'))
}
