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

// member is what stands in the list: identity, group, and the key in the clear if wanted.
func member(b knownBlock) string {
	return b.id.String() + " " + b.group + " " + b.plain
}

func parseMember(text string, until float64) (knownBlock, error) {
	parts := strings.SplitN(text, " ", 3)
	if len(parts) != 3 {
		return knownBlock{}, errors.New("reading the list of blocks: an entry has another form")
	}
	id, err := parseID(parts[0])
	return knownBlock{id: id, group: parts[1], plain: parts[2], until: int64(min(until, 1e15)) * 1000}, err
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

// note lists a block that has just started, without waiting: now is the time of the decision, longest the longest block there
// can be.
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
		entries := make([]redis.Z, len(pending))
		for i, b := range pending {
			entries[i] = redis.Z{Score: float64(b.until / 1000), Member: member(b)}
		}
		ctx := context.Background()
		_, _ = w.any().Pipelined(ctx, func(p redis.Pipeliner) error {
			p.ZAdd(ctx, s.listKey(), entries...)
			p.ZRemRangeByScore(ctx, s.listKey(), "-inf", strconv.FormatInt(now/1000, 10))
			p.ZRemRangeByRank(ctx, s.listKey(), 0, -maxListed-1)
			p.PExpire(ctx, s.listKey(), micro(longest)+time.Second)
			return nil
		})
	}
}

//go:embed unblock.lua
var unblockScript string

var unblockCommand = redis.NewScript(unblockScript)

// unblock forgets the strikes of an identity in a group of which the longest block lasts for longest µs, a block included, and
// says whether there were any.
func (s *redisStore) unblock(ctx context.Context, id ID, group string, longest int64) (bool, error) {
	w := s.client.enter()
	defer s.client.leave(1)
	had, err := unblockCommand.Run(ctx, w.any(), []string{s.key(id)}, "p"+group, longest/1000+1000).Int()
	if err != nil {
		return false, fmt.Errorf("unblocking in Redis: %w", err)
	}
	return had == 1, s.unlist(ctx, w, id, group)
}

// unlist removes the entries of an identity and group, whatever their plain keys are.
func (s *redisStore) unlist(ctx context.Context, w *wire, id ID, group string) error {
	first := member(knownBlock{id: id, group: group})
	scan := w.any().ZScan(ctx, s.listKey(), 0, globbed(first)+"*", 1000).Iterator()
	var found []any
	for scan.Next(ctx) {
		if strings.HasPrefix(scan.Val(), first) { // the scan gives scores, too
			found = append(found, scan.Val())
		}
	}
	if err := s.heal(ctx, w, scan.Err()); err != nil || len(found) == 0 {
		return err
	}
	return w.any().ZRem(ctx, s.listKey(), found...).Err()
}

// globbed escapes what a Redis pattern takes for a wildcard. Group names can hold none, so this is for the day they do.
func globbed(text string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(text)
}

// wall returns a time by the clock of a store.
func wall(us int64) time.Time { return time.UnixMicro(us).UTC() }
