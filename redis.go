package ratelimit

import (
	"context"
	"slices"
	"time"
)

// redisStore keeps the buckets of one configuration in Redis.
type redisStore struct {
	client *redisClient
	prefix string
	told   *hearsay
	list   blockList
	// counted says whether a handler of the configuration wants to know how many nodes there are.
	counted bool
}

// Take implements Store. The charges MUST be one part of what split returns.
func (s *redisStore) Take(ctx context.Context, charges []Charge) (Decision, error) {
	out, err := s.client.take(ctx, patient(charges), charges)
	if err != nil {
		return Decision{}, err
	}
	for i, leased := range out.grants { // it is left for us
		out.tokens[i] += leased
	}
	d := out.decision(charges, SourceRedis)
	d.tokens, d.grants = out.tokens, out.grants
	return d, nil
}

// split implements remoteStore. On a Cluster, what is kept under several keys can be on several servers.
func (s *redisStore) split(charges []Charge) [][]Charge {
	if s.client.settings.kind != redisCluster {
		return nil
	}
	var parts [][]Charge
	for i := range charges {
		same := func(part []Charge) bool { return part[0].ID == charges[i].ID }
		if at := slices.IndexFunc(parts, same); at >= 0 {
			parts[at] = append(parts[at], charges[i])
		} else {
			parts = append(parts, []Charge{charges[i]})
		}
	}
	if len(parts) == 1 {
		return nil
	}
	return parts
}

// giveBack implements remoteStore. If it fails, the tokens flow in again like all others.
func (s *redisStore) giveBack(ctx context.Context, charges []Charge) {
	back := make([]Charge, 0, len(charges))
	for _, c := range charges {
		if !c.DryRun {
			c.Cost, c.Penalty = -c.Cost, nil
			back = append(back, c)
		}
	}
	if len(back) > 0 {
		_, _ = s.client.take(ctx, patient(charges), back)
	}
}

// budget implements remoteStore.
func (s *redisStore) budget(charges []Charge) time.Duration {
	if patient(charges) {
		return s.client.settings.patience
	}
	return s.client.settings.timeout
}

// retryAfter implements remoteStore.
func (s *redisStore) retryAfter(c *Charge) time.Duration { return s.client.retryAfter(s.key(c.ID)) }

func patient(charges []Charge) bool {
	for i := range charges {
		if charges[i].Patient {
			return true
		}
	}
	return false
}

func (s *redisStore) key(id ID) string { return identityKey(s.prefix, id) }
