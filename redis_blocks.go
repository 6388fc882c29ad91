package ratelimit

import (
	"context"
	_ "embed"
	"encoding/base64"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// This file keeps the list of blocks in Redis: a sorted set beside the state of the identities, so that nobody has to scan for
// them. It is for people; no decision depends on it, and what happens to it costs no request anything.

// maxListed bounds the list; the blocks that end last stay.
const maxListed = 100_000

func (s *redisStore) listKey() string { return s.prefix + ":blocks" }

// handMark stands before the group of a block that an operator set. No group can begin with it.
const handMark = "!"

// member is what stands in the list: identity, group, and the key in the clear if wanted.
func member(b knownBlock) string {
	group := b.group
	if b.byHand {
		group = handMark + group
	}
	return b.id.String() + " " + group + " " + b.plain
}

func parseMember(text string, until float64) (knownBlock, error) {
	parts := strings.SplitN(text, " ", 3)
	if len(parts) != 3 {
		return knownBlock{}, errors.New("reading the list of blocks: an entry has another form")
	}
	id, err := parseID(parts[0])
	group, marked := strings.CutPrefix(parts[1], handMark)
	return knownBlock{id: id, group: group, plain: parts[2], until: int64(min(until, 1e15)) * 1000, byHand: marked}, err
}

// parseID reads an identity as it stands in Redis keys and lists.
func parseID(text string) (ID, error) {
	raw, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil || len(raw) != len(ID{}) {
		return ID{}, fmt.Errorf("id %q is not one of ours: it has 22 letters, digits, - and _", text)
	}
	return ID(raw), nil
}

// heal removes a list that is none: another program may have written under its name. The error is nil then.
func (s *redisStore) heal(ctx context.Context, w *wire, err error) error {
	if err == nil || !strings.HasPrefix(err.Error(), "WRONGTYPE") {
		return err
	}
	return w.any().Del(ctx, s.listKey()).Err()
}

// blockList is what is still to be written into the list.
type blockList struct {
	mu      sync.Mutex
	pending []knownBlock
	writing bool
}

// maxPending bounds what is still to be written; what is too much is not listed.
const maxPending = 10_000

// note lists a block, without waiting: now is the time of the decision, longest the longest block for strikes there can be.
func (s *redisStore) note(b knownBlock, now, longest int64) {
	l := &s.list
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.pending) < maxPending {
		l.pending = append(l.pending, b)
	}
	if !l.writing {
		l.writing = true
		go s.writeList(now, longest)
	}
}

// writeList writes until nothing is pending. What cannot be written is not listed.
func (s *redisStore) writeList(now, longest int64) {
	w := s.client.enter()
	defer s.client.leave(1)
	l := &s.list
	for {
		l.mu.Lock()
		pending := l.pending
		l.pending, l.writing = nil, len(pending) > 0
		l.mu.Unlock()
		if len(pending) == 0 {
			return
		}
		ctx := context.Background()
		if blocks := s.certain(ctx, pending); len(blocks) > 0 {
			_ = s.write(ctx, w, blocks, now, longest)
		}
	}
}

// write adds blocks to the list, which lives for so many microseconds at least, and as long as any of them. What was written before
// may keep it for longer.
func (s *redisStore) write(ctx context.Context, w *wire, blocks []knownBlock, now, longest int64) error {
	entries := make([]redis.Z, len(blocks))
	for i, b := range blocks {
		entries[i] = redis.Z{Score: float64(b.until / 1000), Member: member(b)}
		longest = max(longest, b.until-now)
	}
	var ttl *redis.DurationCmd
	add := func(p redis.Pipeliner) error {
		p.ZAdd(ctx, s.listKey(), entries...)
		p.ZRemRangeByScore(ctx, s.listKey(), "-inf", strconv.FormatInt(now/1000, 10))
		p.ZRemRangeByRank(ctx, s.listKey(), 0, -maxListed-1)
		ttl = p.PTTL(ctx, s.listKey())
		return nil
	}
	_, err := w.any().Pipelined(ctx, add)
	if err != nil && s.heal(ctx, w, err) == nil {
		_, err = w.any().Pipelined(ctx, add)
	}
	if err == nil && ttl.Val() < micro(longest)+time.Second {
		err = w.any().PExpire(ctx, s.listKey(), micro(longest)+time.Second).Err()
	}
	if err != nil {
		return fmt.Errorf("listing a block in Redis: %w", err)
	}
	return nil
}

//go:embed hand.lua
var handScript string

var handCommand = redis.NewScript(handScript)

// handTTL is how long, in milliseconds, a key lives at least that an operator wrote: as long as a lifted block may be known
// somewhere, or as the longest block by hand lasts, and an hour for clocks that go wrong.
const handTTL = maxByHand/1000 + 3600_000

// newHandTTL is the same for an identity of which Redis has stored nothing: nobody, mostly, or one whose block was lost. It lasts for
// what was done now, and for as long as a lost block can be known: longest is that of blocks for strikes, and of one known here.
func newHandTTL(time, longest int64) int64 {
	return max(time, -time, longest)/1000 + 3600_000
}

// byHand is what came of the act of an operator.
type byHand struct {
	now  int64 // µs, by the clock of the store
	had  bool  // strikes or a block before
	ends int64 // of the latest block that there is now, 0 if there is none
}

// act does to an identity in a group what an operator wants: a block for so many microseconds, or the lifting of all, with an
// amnesty of so many microseconds below 0. Longest is what newHandTTL wants to know.
func (s *redisStore) act(ctx context.Context, w *wire, id ID, group string, time, longest int64) (byHand, error) {
	reply, err := handCommand.Run(ctx, w.any(), []string{s.key(id)}, "p"+group, time, handTTL, newHandTTL(time, longest)).Int64Slice()
	if err == nil && len(reply) != 3 {
		err = errReply
	}
	if err != nil {
		return byHand{}, err
	}
	return byHand{now: reply[0], had: reply[1] == 1, ends: reply[2]}, nil
}

// block blocks an identity in a group, in place of what an operator set before, and lists that.
func (s *redisStore) block(ctx context.Context, b knownBlock, length, longest int64) (byHand, error) {
	w := s.client.enter()
	defer s.client.leave(1)
	done, err := s.act(ctx, w, b.id, b.group, length, longest)
	if err != nil {
		return done, fmt.Errorf("blocking in Redis: %w", err)
	}
	b.byHand, b.until = true, done.now+length
	return done, s.write(ctx, w, []knownBlock{b}, done.now, length)
}

// unblock forgets the strikes of an identity in a group, every block included.
func (s *redisStore) unblock(ctx context.Context, id ID, group string, amnesty, longest int64) (byHand, error) {
	w := s.client.enter()
	defer s.client.leave(1)
	done, err := s.act(ctx, w, id, group, -amnesty, longest)
	if err != nil {
		return done, fmt.Errorf("unblocking in Redis: %w", err)
	}
	return done, s.unlist(ctx, w, id, group)
}

// unlist removes the entries of an identity and group, whoever set the block and whatever their plain keys are.
func (s *redisStore) unlist(ctx context.Context, w *wire, id ID, group string) error {
	scan := w.any().ZScan(ctx, s.listKey(), 0, id.String()+" *", 1000).Iterator()
	var found []any
	for scan.Next(ctx) {
		if b, err := parseMember(scan.Val(), 0); err == nil && b.id == id && b.group == group { // the scan gives scores, too
			found = append(found, scan.Val())
		}
	}
	if err := s.heal(ctx, w, scan.Err()); err != nil || len(found) == 0 {
		return err
	}
	return w.any().ZRem(ctx, s.listKey(), found...).Err()
}

// wall returns a time by the clock of a store.
func wall(us int64) time.Time { return time.UnixMicro(us).UTC() }
