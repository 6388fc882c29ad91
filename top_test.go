package ratelimit

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"github.com/caddy-tollgate/ratelimit/internal/node"
)

const topNow = int64(1_764_550_000_000_000)

// asksFor notes that a client asks for tokens, and what is true of him.
func asksFor(s *topSketch, truth map[topKey]int64, now int64, client int, tokens int64) {
	c := Charge{Zone: fmt.Sprint("zone", client%3), ID: ID{byte(client), byte(client >> 8)}, Cost: tokens * Token}
	s.note(now, &c, false)
	truth[topKey{c.Zone, c.ID}] += c.Cost
}

// What is said of a client is true within its error, the sum of all is the sum of what was asked for, and whoever asked for more
// than his shard divided by its places is listed.
func TestTopIsTrue(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, truth := newTopSketch(topNow, rapid.IntRange(1, 40).Draw(t, "clients")), map[topKey]int64{}
		random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0)) //nolint:gosec // a test
		zipf, now := rand.NewZipf(random, 1.3, 2, 999), topNow
		for range rapid.IntRange(1, 5000).Draw(t, "requests") {
			asksFor(s, truth, now, int(zipf.Uint64()), int64(1+random.IntN(3)))
			now += int64(random.IntN(2 * topStretch / 5000)) // never as long as both counts
		}
		holdsTruth(t, s, truth, now)
	})
}

func holdsTruth(t *rapid.T, s *topSketch, truth map[topKey]int64, now int64) {
	list, since := s.list(now, 1<<20)
	if since < topNow || since > now {
		t.Fatalf("counted since %d, from %d to %d", since, topNow, now)
	}
	watched := map[topKey]bool{}
	for i, e := range list {
		if e.tokens < truth[e.topKey] || e.tokens-e.error > truth[e.topKey] || e.error > e.tokens {
			t.Fatalf("%v asked for %d, and is said to have asked for %d to %d", e.topKey, truth[e.topKey], e.tokens-e.error, e.tokens)
		}
		if i > 0 && list[i-1].tokens < e.tokens {
			t.Fatalf("%v stands behind one that asked for less", e.topKey)
		}
		watched[e.topKey] = true
	}
	var sums [topShards]int64
	for key, tokens := range truth {
		sums[s.index(key)] += tokens
	}
	for key, tokens := range truth {
		if most := sums[s.index(key)] / int64(s.shards[0].places); !watched[key] && tokens > most {
			t.Fatalf("%v asked for %d, which is more than %d, and is not listed", key, tokens, most)
		}
	}
}

func (s *topSketch) index(key topKey) (i int) {
	for shard := s.shardOf(&Charge{Zone: key.zone, ID: key.id}); &s.shards[i] != shard; i++ {
	}
	return i
}

// However many clients come, so many are watched and no more, and nothing is lost of the sum, also where many ask at once.
func TestTopIsBounded(t *testing.T) {
	s := newTopSketch(topNow, 100)
	const clients, each = 4, 20_000
	var wg sync.WaitGroup
	for g := range clients {
		wg.Go(func() {
			truth := map[topKey]int64{}
			for i := range each {
				asksFor(s, truth, topNow+int64(i), g*each+i, 2)
				if i%1000 == 0 {
					s.list(topNow+int64(i), 10)
				}
			}
		})
	}
	wg.Wait()
	sum, watched := int64(0), 0
	for i := range s.shards {
		n := s.shards[i].current
		watched += len(n.clients)
		if len(n.least) != len(n.clients) {
			t.Errorf("%d places for %d clients", len(n.least), len(n.clients))
		}
		for at, e := range n.least {
			sum += e.tokens
			if e.at != at || n.clients[e.topKey] != e {
				t.Fatalf("%v is not where it should be", e.topKey)
			}
		}
	}
	if watched != 100*topPlaces || sum != clients*each*2*Token {
		t.Errorf("%d are watched, with %d tokens of %d", watched, sum/Token, clients*each*2)
	}
}

// What is long ago is forgotten; what is not is added up over a turn.
func TestTopForgets(t *testing.T) {
	s, c := newTopSketch(topNow, 10), testCharge("api", 1)
	tokens := func(now int64) (sum int64) {
		list, _ := s.list(now, 10)
		for _, e := range list {
			sum += e.tokens / Token
		}
		return sum
	}
	for i, step := range []struct {
		now  int64
		want int64
		why  string
	}{
		{topNow, 1, "the first"},
		{topNow + topStretch - 1, 2, "the same stretch"},
		{topNow + topStretch, 3, "the next, beside the one before"},
		{topNow + 2*topStretch, 2, "the first stretch is forgotten"},
		{topNow + 4*topStretch, 1, "a long pause forgets both"},
	} {
		s.note(step.now, &c, true)
		if got := tokens(step.now); got != step.want {
			t.Errorf("step %d: %d tokens, want %d: %s", i, got, step.want, step.why)
		}
	}
	if got := tokens(topNow + 6*topStretch); got != 0 {
		t.Errorf("after a long pause: %d tokens", got)
	}
}

func TestTopOfANode(t *testing.T) {
	config := func(global, block string) string {
		return site("redis off\n"+global, "zone api {\n key {query.who}\n rate 1/h\n burst 5\n cost 2\n}\n"+block)
	}
	n := node.Start(t, config("", "log_key"))
	top := func(query string) (info topInfo) {
		t.Helper()
		answer := n.Admin(http.MethodGet, "/rate_limit/top"+query, "")
		if err := json.Unmarshal([]byte(answer.Body), &info); err != nil || answer.Status != http.StatusOK {
			t.Fatalf("%+v, %v", answer, err)
		}
		return info
	}
	if info := top(""); info.Enabled || info.Clients == nil || info.Since != nil {
		t.Errorf("nobody asked for it: %+v", info)
	}
	load := func(text string) {
		t.Helper()
		if err := n.Load(text); err != nil {
			t.Fatal(err)
		}
	}
	load(config("top 3", "log_key\nheaders on"))
	for who, times := range map[string]int{"alice": 4, "bob": 1} {
		statuses(n, times, "/?who="+who)
	}
	info := top("")
	if !info.Enabled || info.Since == nil || len(info.Clients) != 2 {
		t.Fatalf("got %+v", info)
	}
	alice := info.Clients[0]
	if alice.Zone != "api" || alice.Key != "alice" || alice.Tokens != 8 || alice.Error != 0 || alice.Refused != 2 {
		t.Errorf("got %+v", alice)
	}
	if some := top("?limit=1"); len(some.Clients) != 1 || some.Clients[0] != alice {
		t.Errorf("the first: %+v", some)
	}
	load(config("top 3", "headers off")) // a reload keeps what is known, and shows no key where none may be
	for _, c := range top("").Clients {
		if c.Key != "" || c.Tokens == 0 {
			t.Errorf("without log_key: %+v", c)
		}
	}
	for _, wrong := range []string{"?limit=0", "?limit=10001", "?limit=x", "?most=1"} {
		if answer := n.Admin(http.MethodGet, "/rate_limit/top"+wrong, ""); answer.Status != http.StatusBadRequest {
			t.Errorf("%s: %+v", wrong, answer)
		}
	}
	if answer := n.Admin(http.MethodPost, "/rate_limit/top", "{}"); answer.Status != http.StatusMethodNotAllowed {
		t.Errorf("POST: %+v", answer)
	}
	if strings.Contains(n.Admin(http.MethodGet, "/metrics", "").Body, "alice") {
		t.Error("a client is in the metrics")
	}
}
