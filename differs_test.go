package ratelimit

import (
	"slices"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func rateFrom(t *testing.T, text string) Rate {
	t.Helper()
	r, err := ParseRate(text)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestZoneDiffers(t *testing.T) {
	rate := func(text string) Rate { return rateFrom(t, text) }
	paths := caddyhttp.RawMatcherSets{caddy.ModuleMap{"path": []byte(`["/a"]`)}}
	for _, row := range []struct {
		why  string
		a, b Zone
		want []string
	}{
		{"the same", Zone{Rate: rate("60/m")}, Zone{Rate: rate("60/m")}, nil},
		{"defaults written out", Zone{Rate: rate("60/m")}, Zone{
			Rate: rate("60/1m"), Burst: 60, Key: "{client_ip}", IPv4Prefix: new(32), IPv6Prefix: new(64), OnStoreError: "local",
		}, nil},
		{"the default key in full", Zone{}, Zone{Key: "{http.vars.client_ip}"}, nil},
		{"the shorthand within a key", Zone{Key: "a{client_ip}"}, Zone{Key: "a{http.vars.client_ip}"}, nil},
		{"what is not the bucket's", Zone{}, Zone{
			MatchRaw: paths, Costs: []Cost{{Tokens: 2}}, SensitiveRaw: paths, OnEmpty: "deny", Penalty: "off", Headers: "off", DryRun: true,
		}, nil},
		{"one speed, but the default burst comes from the count", Zone{Rate: rate("60/m")}, Zone{Rate: rate("1/s")}, []string{"burst"}},
		{"one speed, one burst", Zone{Rate: rate("60/m"), Burst: 5}, Zone{Rate: rate("1/s"), Burst: 5}, nil},
		{"another rate, one burst", Zone{Rate: rate("5/s")}, Zone{Rate: rate("5/m")}, []string{"rate"}},
		{"another key", Zone{}, Zone{Key: "all"}, []string{"key"}},
		{"prefix of 0", Zone{}, Zone{IPv4Prefix: new(0), IPv6Prefix: new(0)}, []string{"ipv4_prefix", "ipv6_prefix"}},
		{"another store", Zone{}, Zone{Store: "memory"}, []string{"store"}},
		{"another policy", Zone{}, Zone{OnStoreError: "full"}, []string{"on_store_error"}},
	} {
		if got := row.a.differs(&row.b); !slices.Equal(got, row.want) {
			t.Errorf("%s: differs in %v, want %v", row.why, got, row.want)
		}
		if got := row.b.differs(&row.a); !slices.Equal(got, row.want) {
			t.Errorf("%s, the other way: differs in %v, want %v", row.why, got, row.want)
		}
	}
}

func TestPenaltyDiffers(t *testing.T) {
	minutes := func(n time.Duration) caddy.Duration { return caddy.Duration(n * time.Minute) }
	for _, row := range []struct {
		why  string
		a, b Penalty
		want []string
	}{
		{"defaults written out", Penalty{}, Penalty{After: new(int64(3)), Base: minutes(1), Max: minutes(60), Window: minutes(60)}, nil},
		{"who is excepted", Penalty{}, Penalty{ExceptRaw: caddyhttp.RawMatcherSets{{}}}, nil},
		{"a dry run counts apart", Penalty{}, Penalty{DryRun: true}, []string{"dry_run"}},
		{"after 0", Penalty{}, Penalty{After: new(int64(0))}, []string{"after"}},
		{"all", Penalty{}, Penalty{
			After: new(int64(4)), Base: minutes(2), Max: minutes(2), Window: minutes(2), Every: minutes(2),
		}, []string{"after", "base", "max", "window", "every"}},
	} {
		if got := row.a.differs(&row.b); !slices.Equal(got, row.want) {
			t.Errorf("%s: differs in %v, want %v", row.why, got, row.want)
		}
	}
}

func TestShedDiffers(t *testing.T) {
	for _, row := range []struct {
		why  string
		a, b Shed
		want []string
	}{
		{"the default written out", Shed{}, Shed{MaxInFlight: 100}, nil},
		{"what clients are told", Shed{}, Shed{RetryAfter: caddy.Duration(time.Second)}, nil},
		{"another number", Shed{MaxInFlight: 10}, Shed{MaxInFlight: 20}, []string{"max_in_flight"}},
	} {
		if got := row.a.differs(&row.b); !slices.Equal(got, row.want) {
			t.Errorf("%s: differs in %v, want %v", row.why, got, row.want)
		}
	}
}
