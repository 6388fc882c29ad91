package ratelimit

import (
	"context"
	_ "embed"
	"errors"
	"slices"
	"time"
)

//go:embed bucket.lua
var bucketScript string

// redisStore keeps the buckets of one configuration in Redis.
type redisStore struct {
	client *redisClient
	prefix string
	// clock is a test clock in microseconds; empty in production, where Redis TIME is the only clock.
	clock string
}

// Take implements Store. It waits for the answer even if the client is gone by then: a request whose connection was
// closed on purpose must neither be free nor count as a failure of Redis.
func (s *redisStore) Take(ctx context.Context, charges []Charge) (Decision, error) {
	keys, args := s.arguments(charges)
	reply, err := s.client.run(context.WithoutCancel(ctx), patient(charges), keys, args)
	if err != nil {
		return Decision{}, err
	}
	out, err := decodeOutcome(reply, len(charges))
	if err != nil {
		return Decision{}, err
	}
	return out.decision(charges, SourceRedis), nil
}

// retryAfter returns how long until it is worth to try again, while Redis is down.
func (s *redisStore) retryAfter() time.Duration { return s.client.retryAfter() }

func patient(charges []Charge) bool {
	for i := range charges {
		if charges[i].Patient {
			return true
		}
	}
	return false
}

// key is where the state of an identity lives. The braces make it one slot of a Redis Cluster.
func (s *redisStore) key(id ID) string {
	return s.prefix + ":{" + id.String() + "}"
}

// arguments lays the charges out as bucket.lua reads them.
func (s *redisStore) arguments(charges []Charge) (keys []string, args []any) {
	var ids []ID
	var groups []*penaltyRules
	args = append(make([]any, 0, 3+14*len(charges)), s.clock, len(charges), 0)
	for i := range charges {
		c := &charges[i]
		if !slices.Contains(ids, c.ID) {
			ids = append(ids, c.ID)
			keys = append(keys, s.key(c.ID))
		}
		if c.Penalty != nil && groupIndex(groups, c.Penalty) == 0 {
			groups = append(groups, c.Penalty)
		}
		args = append(args, slices.Index(ids, c.ID)+1, c.Zone, c.Limit.Num, c.Limit.Den, c.Limit.Burst, c.Cost, flags(c), groupIndex(groups, c.Penalty))
	}
	args[2] = len(groups)
	for _, g := range groups {
		args = append(args, g.group, g.after, g.base, g.max, g.window, g.every)
	}
	return keys, args
}

// groupIndex returns where the group of a penalty is, from 1, or 0.
func groupIndex(groups []*penaltyRules, p *penaltyRules) int {
	return slices.IndexFunc(groups, func(g *penaltyRules) bool { return p != nil && g.group == p.group }) + 1
}

func flags(c *Charge) int {
	flags := 0
	if !c.NoStrike {
		flags |= 1
	}
	if c.DryRun {
		flags |= 2
	}
	return flags
}

// errReply is an answer of the script that this version cannot read.
var errReply = errors.New("redis: unexpected reply of the script")

// decodeOutcome reads the reply of bucket.lua for so many charges.
func decodeOutcome(reply any, charges int) (outcome, error) {
	values, ok := reply.([]any)
	if !ok || len(values) != 7+charges {
		return outcome{}, errReply
	}
	n := make([]int64, len(values))
	for i, v := range values {
		if n[i], ok = v.(int64); !ok {
			return outcome{}, errReply
		}
	}
	out := outcome{
		verdict: verdict(n[0]), now: n[1], until: n[3],
		strikes: n[4], blockStarted: n[5] == 1, tokens: n[7:],
	}
	if n[0] < 0 || n[0] > int64(verdictBlocked) {
		return outcome{}, errReply
	}
	if out.verdict == verdictBlocked {
		if n[2] < 1 || n[2] > int64(charges) {
			return outcome{}, errReply
		}
		out.charge = int(n[2]) - 1
	}
	return out, nil
}
