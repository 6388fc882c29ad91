package ratelimit

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// This file lists who is blocked, for GET /rate_limit/blocks: what ends soonest comes first, and never more at a time than were
// asked for.

const (
	// usualBlocks and mostBlocks are how many are listed by default, and at most.
	usualBlocks, mostBlocks = 1000, 10_000
)

// blockPlace is where a block stands in the order of the list. It is what a client gives back to see what comes after.
type blockPlace struct {
	until     int64 // ms
	id, group string
}

func (b *knownBlock) place() blockPlace {
	p := blockPlace{until: b.until / 1000, id: b.id.String(), group: b.group}
	if b.byHand {
		p.group = handMark + p.group
	}
	return p
}

func (p blockPlace) compare(other blockPlace) int {
	return cmp.Or(cmp.Compare(p.until, other.until), cmp.Compare(p.id, other.id), cmp.Compare(p.group, other.group))
}

// isAfter says whether a block comes after a place.
func (b *knownBlock) isAfter(p blockPlace) bool {
	until := b.until / 1000
	return until > p.until || until == p.until && b.place().compare(p) > 0
}

// compare orders blocks as Redis orders its list: those that end in the same millisecond by what is written for them.
func (b *knownBlock) compare(other *knownBlock) int {
	if byEnd := cmp.Compare(b.until/1000, other.until/1000); byEnd != 0 {
		return byEnd // which spares nearly all of them the text
	}
	return b.place().compare(other.place())
}

// String returns the place as it stands in an address.
func (p blockPlace) String() string { return fmt.Sprintf("%d.%s.%s", p.until, p.id, p.group) }

func parseBlockPlace(text string) (p blockPlace, err error) {
	parts := strings.SplitN(text, ".", 3)
	if len(parts) != 3 {
		return p, fmt.Errorf("after must be what the list before gave as next, got %q", text)
	}
	p.id, p.group = parts[1], parts[2]
	if p.until, err = strconv.ParseInt(parts[0], 10, 64); err != nil {
		return p, fmt.Errorf("after must be what the list before gave as next, got %q", text)
	}
	return p, nil
}

// sortBlocks puts blocks into the order of the list, and returns at most so many of them.
func sortBlocks(list []knownBlock, most int) []knownBlock {
	slices.SortFunc(list, func(x, y knownBlock) int { return x.compare(&y) })
	return list[:min(len(list), most)]
}

func listBlocks(ctx context.Context, a *App, r *http.Request) (any, error) {
	limit, after, err := readPage(r)
	if err != nil {
		return nil, err
	}
	found, failed := a.blocks(ctx, after, limit+1)
	slices.SortStableFunc(found, func(x, y listedBlock) int { return x.compare(&y.knownBlock) })
	info := blocksInfo{Blocks: []blockInfo{}, More: len(found) > limit, Errors: failed}
	found = found[:min(len(found), limit)]
	if info.More {
		info.Next = found[limit-1].place().String()
	}
	for i := range found {
		info.Blocks = append(info.Blocks, found[i].info())
	}
	return info, nil
}

func readPage(r *http.Request) (limit int, after blockPlace, err error) {
	given, err := query(r, "limit", "after")
	if err != nil {
		return 0, after, err
	}
	limit = usualBlocks
	if text, ok := given["limit"]; ok {
		if limit, err = strconv.Atoi(text); err != nil || limit < 1 || limit > mostBlocks {
			return 0, after, adminError(http.StatusBadRequest, "limit must be a number from 1 to %d, got %q", mostBlocks, text)
		}
	}
	if text, ok := given["after"]; ok {
		if after, err = parseBlockPlace(text); err != nil {
			return 0, after, adminError(http.StatusBadRequest, "%w", err)
		}
	}
	return limit, after, nil
}

// listedBlock is a block and where it is known.
type listedBlock struct {
	knownBlock
	store Source
}

func (b *listedBlock) info() blockInfo {
	return blockInfo{ID: b.id.String(), Group: b.group, Key: b.plain, Until: wall(b.until), Store: b.store.String(), ByHand: b.byHand}
}

// blocks lists up to so many blocks of each store that come after a place. All Redis are asked at once: one that hangs takes no
// time from the others. If one does not answer, what this node remembers is listed too.
func (a *App) blocks(ctx context.Context, after blockPlace, most int) (all []listedBlock, failed []string) {
	now := processMicros()
	add := func(store Source, blocks []knownBlock) {
		for _, b := range blocks {
			all = append(all, listedBlock{b, store})
		}
	}
	add(SourceMemory, a.stores.local.blocksAfter(now, after, most))
	found, errs := make([][]knownBlock, len(a.remotes)), make([]error, len(a.remotes))
	var asked sync.WaitGroup
	for i, s := range a.remotes {
		asked.Go(func() { found[i], errs[i] = s.blocksAfter(ctx, after, most) })
	}
	asked.Wait()
	for i, s := range a.remotes {
		add(SourceRedis, found[i])
		if errs[i] != nil {
			add(SourceShare, s.told.blocks.blocksAfter(now, after, most))
			failed = append(failed, fmt.Sprintf("%s: %s", &s.client.settings, errs[i]))
		}
	}
	return all, failed
}
