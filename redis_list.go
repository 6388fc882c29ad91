package ratelimit

import (
	"context"
	"fmt"
	"slices"
	"strconv"

	"github.com/redis/go-redis/v9"
)

// This file reads the list of blocks in Redis, a bounded part at a time.

// listPart is how many entries of the list one command returns, for which everybody else at the server waits.
const listPart = 1000

// doubtPart is how many identities are asked about in one call.
const doubtPart = 100

// certain returns the blocks that there are, of some that there may be. Where Redis does not say, there is none.
func (s *redisStore) certain(ctx context.Context, maybe []knownBlock) []knownBlock {
	var blocks, doubted []knownBlock
	for _, b := range maybe {
		if b.doubt == nil {
			blocks = append(blocks, b)
		} else {
			doubted = append(doubted, b)
		}
	}
	for part := range slices.Chunk(doubted, doubtPart) {
		charges := make([]Charge, len(part))
		for i, b := range part {
			charges[i] = Charge{ID: b.id, Penalty: b.doubt}
		}
		states, _ := s.peek(ctx, charges)
		for i := range states {
			if b := part[i]; states[i].record.until > states[i].now {
				b.until = states[i].record.until
				blocks = append(blocks, b)
			}
		}
	}
	return blocks
}

// blocksAfter lists up to so many of those who are blocked now: the first in the order of the list that come after a place.
func (s *redisStore) blocksAfter(ctx context.Context, after blockPlace, most int) ([]knownBlock, error) {
	w := s.client.enter()
	defer s.client.leave(1)
	now, err := w.any().Time(ctx).Result()
	if err != nil {
		return nil, fmt.Errorf("asking Redis for the list of blocks: %w", err)
	}
	part := redis.ZRangeBy{Min: "(" + strconv.FormatInt(now.UnixMilli(), 10), Max: strconv.FormatInt(now.Add(maxFill).UnixMilli(), 10), Count: listPart}
	if after.until > now.UnixMilli() {
		part.Min = strconv.FormatInt(after.until, 10) // those that end together are told apart below
	}
	list := []knownBlock{}
	for len(list) < most {
		found, err := w.any().ZRangeByScoreWithScores(ctx, s.listKey(), &part).Result()
		if err = s.heal(ctx, w, err); err != nil {
			return nil, fmt.Errorf("asking Redis for the list of blocks: %w", err)
		}
		for _, z := range found {
			b, err := parseMember(fmt.Sprint(z.Member), z.Score)
			switch last := len(list) - 1; {
			case err != nil || !b.isAfter(after): // others are not ours
			case last >= 0 && list[last].place() == b.place():
				list[last] = b // one block, listed by nodes with log_key and without: that with the key comes later
			default:
				list = append(list, b)
			}
		}
		if len(found) < listPart {
			break
		}
		part.Offset += listPart
	}
	return sortBlocks(list, most), nil
}
