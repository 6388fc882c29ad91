package main

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"net/http"
	"os"
	"strconv"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/redis/go-redis/v9"
)

func init() { caddy.RegisterModule(&Handler{}) }

// token is one token as the script counts them.
const token = 1_000_000

// Handler limits by the header X-Key.
type Handler struct {
	// Redis is host and port, Script the path of bucket.lua.
	Redis, Script string
	// Num millionths of a token flow in every Den microseconds, into a bucket of so many tokens.
	Num, Den, Burst int64

	client *redis.Client
	script *redis.Script
}

// CaddyModule implements caddy.Module.
func (*Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.bench_reference", New: func() caddy.Module { return new(Handler) }}
}

// Provision implements caddy.Provisioner.
func (h *Handler) Provision(caddy.Context) error {
	text, err := os.ReadFile(h.Script)
	if err != nil {
		return fmt.Errorf("reading the script: %w", err)
	}
	h.client, h.script = redis.NewClient(&redis.Options{Addr: h.Redis}), redis.NewScript(string(text))
	return nil
}

// Cleanup implements caddy.CleanerUpper.
func (h *Handler) Cleanup() error {
	if h.client == nil {
		return nil
	}
	return h.client.Close()
}

// ServeHTTP implements caddyhttp.MiddlewareHandler. It shows the numbers that ours shows.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	verdict, now, left, err := h.take(r.Context(), r.Header.Get("X-Key"))
	if err != nil {
		return err
	}
	full := now + (h.Burst*token-left)*h.Den/h.Num
	header := w.Header()
	header.Set("X-Ratelimit-Limit", strconv.FormatInt(h.Burst, 10))
	header.Set("X-Ratelimit-Remaining", strconv.FormatInt(left/token, 10))
	header.Set("X-Ratelimit-Reset", strconv.FormatInt(full/1_000_000+1, 10))
	if verdict != 0 {
		return caddyhttp.Error(http.StatusTooManyRequests, nil)
	}
	return next.ServeHTTP(w, r)
}

// take asks the script about one token, in a batch of one as its header describes it, and returns what of its reply matters here.
func (h *Handler) take(ctx context.Context, key string) (verdict, now, left int64, err error) {
	id := sha256.Sum256([]byte(key))
	keys := []string{"reference:{" + base64.RawURLEncoding.EncodeToString(id[:16]) + "}"}
	reply, err := h.script.Run(ctx, h.client, keys, "", h.batch()).Int64Slice()
	if err != nil {
		return 0, 0, 0, err
	}
	if len(reply) < 4 {
		return 0, 0, 0, fmt.Errorf("the script replied %d numbers, not 4 or 5", len(reply))
	}
	return reply[2], reply[0], reply[len(reply)-1], nil
}

// batch is one request of one charge.
func (h *Handler) batch() []byte {
	const flags, group, charges = 1, 0, 1
	b := []byte{0, 0, 1, 0, 1, 0, 0, 0, 1} // no group; one policy, one bucket; no record; one request
	b = binary.BigEndian.AppendUint32(b, uint32(h.Num))
	b = binary.BigEndian.AppendUint32(b, uint32(h.Den))
	b = append(b, int7(h.Burst*token)...)
	b = append(b, int7(token)...)
	b = append(b, flags, group, uint8(len("zapi")))
	b = append(b, "zapi"...)
	b = append(b, 0, 1, 0, 1)                // the bucket: its key, the policy that names its field
	b = append(b, charges, 0, 1, 0, 1, 0, 0) // the charge: its bucket, its policy, no record
	return append(b, int7(0)...)             // no known block
}

func int7(n int64) []byte { return binary.BigEndian.AppendUint64(nil, uint64(n))[1:] }

var (
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddy.CleanerUpper          = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
)
