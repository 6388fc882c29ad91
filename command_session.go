package ratelimit

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// This file asks the admin endpoint on behalf of a command, and says in one line what went wrong.

// maxAnswer bounds what is read of an answer.
const maxAnswer = 64 << 20

// session is one run of a command.
type session struct {
	address string
	flags   *pflag.FlagSet
	raw     bool // print the JSON as it came
	out     io.Writer
}

func newSession(cmd *cobra.Command) (*session, error) {
	flags := cmd.Flags()
	address, err := caddycmd.DetermineAdminAPIAddress(flagText(flags, "address"), nil, flagText(flags, "config"), flagText(flags, "adapter"))
	if err != nil {
		return nil, fmt.Errorf("finding the admin endpoint: %w", err)
	}
	return &session{
		address: address, flags: flags, raw: flagText(flags, "json") == "true", out: cmd.OutOrStdout(),
	}, nil
}

// text returns the value of a flag.
func (s *session) text(name string) string { return flagText(s.flags, name) }

// given returns the value of a flag, nil if it was not written: an empty group is the default one, none is all of them.
func (s *session) given(name string) *string {
	if !s.flags.Changed(name) {
		return nil
	}
	value := s.text(name)
	return &value
}

// askAdmin sends a request to a route of the admin endpoint, and prints the answer: as JSON if that is wanted, else as show does it.
func askAdmin[T any](s *session, method, route string, body any, show func(*page, *T)) error {
	content, err := s.send(method, route, body)
	if err != nil {
		return err
	}
	if s.raw {
		var indented bytes.Buffer
		if err := json.Indent(&indented, bytes.TrimSpace(content), "", "  "); err != nil {
			return fmt.Errorf("reading the answer: %w", err)
		}
		indented.WriteByte('\n')
		_, err = indented.WriteTo(s.out)
		return err
	}
	var answer T
	if err := json.Unmarshal(content, &answer); err != nil {
		return fmt.Errorf("reading the answer: %w: is the Caddy that runs of another version? --json prints what it says", err)
	}
	p := newPage(s.out, time.Now())
	show(p, &answer)
	return p.flush()
}

func (s *session) send(method, route string, body any) ([]byte, error) {
	var content io.Reader
	if body != nil {
		encoded, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		content = bytes.NewReader(encoded)
	}
	response, err := caddycmd.AdminAPIRequest(s.address, method, "/rate_limit/"+route, http.Header{}, content)
	if err != nil {
		return nil, s.failure(err)
	}
	defer response.Body.Close()
	return io.ReadAll(io.LimitReader(response.Body, maxAnswer))
}

// endpointSaid is how Caddy's own client for the admin endpoint puts what the endpoint said.
const endpointSaid = "caddy responded with error: "

// failure puts an error of Caddy's client for the admin endpoint into one line.
func (s *session) failure(err error) error {
	said, refused := strings.CutPrefix(err.Error(), endpointSaid)
	if !refused {
		return fmt.Errorf("asking the admin endpoint at %s: %s: is Caddy running? --address or --config say where",
			clean(s.address), clean(err.Error()))
	}
	var answer struct {
		Error string `json:"error"`
	}
	status, body, _ := strings.Cut(said, ": ")
	if json.Unmarshal([]byte(body), &answer) == nil && answer.Error != "" {
		return fmt.Errorf("%s", clean(answer.Error))
	}
	return fmt.Errorf("the admin endpoint at %s answers %s: %s", clean(s.address), clean(status), clean(strings.TrimSpace(body)))
}
