package ratelimit

import (
	"context"
	_ "embed"
	"encoding/binary"
	"fmt"

	"github.com/redis/go-redis/v9"
)

// This file reads what Redis holds for charges, without a decision, and fills a bucket there.

//go:embed peek.lua
var peekScript string

var peekCommand = redis.NewScript(peekScript)

// isDown says whether the server that keeps an identity is known not to answer.
func (s *redisStore) isDown(id ID) bool {
	w := s.client.enter()
	defer s.client.leave(1)
	down, _ := w.route(s.key(id)).breaker.state()
	return down
}

// peek reads the state of charges, in one call, or on a Cluster, where each may be on another server, in one for each.
func (s *redisStore) peek(ctx context.Context, charges []Charge) (states []peeked, err error) {
	if s.client.settings.kind != redisCluster {
		return s.peekPart(ctx, charges)
	}
	for i := range charges {
		one, err := s.peekPart(ctx, charges[i:i+1])
		if err != nil {
			return nil, err
		}
		states = append(states, one...)
	}
	return states, nil
}

func (s *redisStore) peekPart(ctx context.Context, charges []Charge) ([]peeked, error) {
	w := s.client.enter()
	defer s.client.leave(1)
	keys, fields := peekArguments(s.prefix, charges)
	reply, err := peekCommand.Run(ctx, w.any(), keys, fields...).Slice()
	if err != nil {
		return nil, fmt.Errorf("asking Redis for the state of a client: %w", err)
	}
	return peekReply(charges, reply)
}

// peekArguments returns the keys and the fields that peek.lua reads for charges.
func peekArguments(prefix string, charges []Charge) (keys []string, fields []any) {
	for i := range charges {
		c := &charges[i]
		keys = append(keys, identityKey(prefix, c.ID))
		fields = append(fields, len(keys), "z"+c.Zone, len(keys), "p"+groupOf(c))
	}
	return keys, fields
}

// peekReply reads what peek.lua returns for charges.
func peekReply(charges []Charge, reply []any) ([]peeked, error) {
	now, ok := int64(0), len(reply) == 1+2*len(charges)
	if ok {
		now, ok = reply[0].(int64)
	}
	if !ok {
		return nil, errReply
	}
	states := make([]peeked, len(charges))
	for i := range charges {
		bucket, _ := reply[1+2*i].(string)
		record, _ := reply[2+2*i].(string)
		states[i] = settledState(now, &charges[i], bucket, record)
	}
	return states, nil
}

func groupOf(c *Charge) string {
	if c.Penalty == nil {
		return ""
	}
	return c.Penalty.group
}

// settledState returns what is stored for a charge as it is now.
func settledState(now int64, c *Charge, bucket, record string) peeked {
	p := peeked{source: SourceRedis, now: now, limit: c.Limit}
	b, leased := decodeBucket(bucket)
	b, _, _ = b.settledBeside(leased, c.Limit, now)
	p.tokens = b.Tokens
	if c.Penalty != nil {
		p.record, _ = decodeRecord(record).settled(c.Penalty, now)
	}
	return p
}

//go:embed reset.lua
var resetScript string

var resetCommand = redis.NewScript(resetScript)

// reset fills the bucket of a charge, and says whether there was one.
func (s *redisStore) reset(ctx context.Context, c *Charge) (bool, error) {
	w := s.client.enter()
	defer s.client.leave(1)
	had, err := resetCommand.Run(ctx, w.any(), []string{s.key(c.ID)}, "z"+c.Zone).Int()
	if err != nil {
		return false, fmt.Errorf("resetting in Redis: %w", err)
	}
	return had == 1, nil
}

// decodeBucket reads a bucket as bucket.lua stores it; what it does not know is a full one.
func decodeBucket(raw string) (b Bucket, leased leaseSums) {
	const plain, withLeases = 23, 37
	switch {
	case len(raw) == plain && raw[0] == 1:
	case len(raw) == withLeases && raw[0] == 2:
	default:
		return Bucket{}, leaseSums{}
	}
	b.Tokens, b.At = int7(raw[1:]), uint7(raw[8:])
	b.Num, b.Den = int64(binary.BigEndian.Uint32([]byte(raw[15:]))), int64(binary.BigEndian.Uint32([]byte(raw[19:])))
	if len(raw) == withLeases {
		leased = leaseSums{this: min(uint7(raw[23:]), maxExact), before: min(uint7(raw[30:]), maxExact)}
	}
	return b, leased
}

// decodeRecord reads a record of strikes as bucket.lua stores it; what it does not know is none.
func decodeRecord(raw string) (r strikeRecord) {
	const plain, byHand = 17, 24
	switch {
	case len(raw) == plain && raw[0] == 1:
	case len(raw) == byHand && raw[0] == 2:
	default:
		return strikeRecord{}
	}
	r.strikes = int64(binary.BigEndian.Uint16([]byte(raw[1:])))
	r.until, r.last = uint7(raw[3:]), uint7(raw[10:])
	if len(raw) == byHand {
		r.hand = int7(raw[17:])
	}
	return r
}

// uint7 reads seven bytes as Lua packs them, int7 with a sign.
func uint7(raw string) int64 { return int64(binary.BigEndian.Uint64([]byte("\x00" + raw[:7]))) }

func int7(raw string) int64 { return int64(binary.BigEndian.Uint64([]byte(raw[:7]+"\x00"))) >> 8 }
