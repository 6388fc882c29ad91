package ratelimit

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"slices"
	"strings"
	"testing"
)

// reports says which test answers which report of users of other limiters. The sources are the team's research: gateways C,
// caddy-field c and shedding d, by their numbers.
var reports = []struct{ report, answeredBy string }{
	{"gateways C-1 1: keys without a TTL", "TestScriptIsTheModel TestExactOverNodes"},
	{"gateways C-1 2: a TTL a thousand times too long", "TestKeyOutlivesASmallerBurst TestPenaltyTimeline"},
	{"gateways C-1 3, 4: a TTL shorter than the refill gives the burst back", "TestKeyOutlivesASmallerBurst TestBurstRefillAndRetryAfter"},
	{"gateways C-1 6: burst 0 or rate 0 disables the limit", "TestCaddyfileErrors TestErrorsOfProvision"},
	{"gateways C-1 7, 9, 10: a path that sets no expiry", "TestScriptIsTheModel TestStoredStateIsHostile"},
	{"gateways C-1 11: a TTL that was lost locks out for days", "TestStoredStateIsHostile"},
	{"gateways C-1 12: long keys cost memory", "TestKeyLongValueCostsNoMemory TestIDLayout"},
	{"gateways C-1 13: decimals fail in Redis", "TestOddNumbers"},
	{"gateways C-1 14: keys in the clear in Redis and logs", "TestExactOverNodes TestBlocksCanBeLifted"},
	{"gateways C-1 15: bogus keys mint fresh buckets", "TestRepeatedKeysAreNoFreshBuckets TestMemoryFlood TestWarnings"},
	{"gateways C-1 16: one bucket for everybody without a key", "TestUnixSocket TestKeyMissing"},
	{"gateways C-1 17: out of memory in the middle of a script", "TestRedisThatCannotWriteDoesNotFlap"},
	{"gateways C-2 21: a clock that goes back refills", "TestClockStepsBack TestMemoryClockGoesBack"},
	{"gateways C-2 22: the steady rate is missed", "TestLongRunAdmitsRateTimesTime"},
	{"gateways C-2 23: rates below one a second", "TestOddNumbers TestRefilledIsExact"},
	{"gateways C-2 24: daily limits overflow", "TestOddNumbers TestRefilled"},
	{"gateways C-2 25: a rate that is no whole period drifts", "TestLongRunAdmitsRateTimesTime"},
	{"gateways C-2 28, 29: a cost above the limit", "TestCaddyfileErrors TestErrorsOfProvision"},
	{"gateways C-2 30: Reset wobbles between nodes", "TestResetIsTheSameOnAllNodes TestResetIsWhenTheBucketIsFull"},
	{"gateways C-2 31: overflow at run time", "TestErrorsOfProvision TestRefilled"},
	{"gateways C-3 32, 34: refused requests are charged in other limits", "TestAllOrNothing TestMemoryAllOrNothing"},
	{"gateways C-3 33, 37, 38: read and increment race", "TestExactOverNodes TestMemoryIsExactUnderConcurrency"},
	{"gateways C-3 35: two limiters halve the tokens", "TestOneChargeARequest"},
	{"gateways C-3 41: a cost that is no number", "TestCaddyfileErrors"},
	{"gateways C-4 47, 48: a lost reply is sent again", "TestLostReply"},
	{"gateways C-4 52: a forgotten script counts as an outage", "TestScriptFlushUnderLoad"},
	{"gateways C-4 53: READONLY until a restart", "TestRedisThatCannotWriteDoesNotFlap"},
	{"gateways C-4 55, 56, 58: a hanging Redis stalls requests", "TestHangingRedisIsLeftAlone TestRedisDiesUnderLoad"},
	{"gateways C-4 60, 61: Redis is needed at start", "TestRedisAbsent"},
	{"gateways C-4 63: a client for each reload", "TestClientsLeaveNothing TestReloadsKeepStateAndResources"},
	{"gateways C-5 65: only open or only closed", "TestWhatHoldsWhileTheStoreIsDown TestUnavailableSaysWhenToTryAgain"},
	{"gateways C-5 66: the fallback doubles the quota", "TestRefusalIsNoFailure"},
	{"gateways C-5 67: stores behave differently", "TestScriptIsTheModel TestMemoryIsTheModel TestAnswers"},
	{"gateways C-5 68: one budget for each route", "TestOneChargeARequest TestPatchOfASharedZone"},
	{"gateways C-5 69: two limits share one key", "TestAllOrNothing"},
	{"gateways C-5 71: a changed limit is ignored, or refills", "TestTokensSurviveAChangeOfTheLimit TestReloadsUnderLoad TestLoweredLimits"},
	{"gateways C-6 76: bans never expire", "TestPenaltyTimeline TestBlocks"},
	{"gateways C-6 77: requests during a ban prolong it", "TestPenaltyTimeline"},
	{"gateways C-6 79, 80: escalation, cap and decay", "TestPenaltyTimeline TestBlockLength TestStrikesAreForgotten"},
	{"gateways C-6 82: refused requests keep the client out", "TestBurstRefillAndRetryAfter"},
	{"gateways C-6 83: a victim's address is punished", "TestForwardedAddressOfAnUntrustedPeer TestEarlyDataWithAVictimsAddress"},
	{"gateways C-7 84: the left-most forwarded address", "TestForwardedAddressOfAnUntrustedPeer TestWarnings"},
	{"gateways C-7 86: every IPv6 address is a client", "TestOneNetworkIsOneClient TestKeyThousandAddressesOfOneNetwork"},
	{"gateways C-7 87: mapped IPv4", "TestOneNetworkIsOneClient TestKeyGroupsAddresses"},
	{"gateways C-7 88: NAT64 is one client", "TestOneNetworkIsOneClient"},
	{"gateways C-10 112: nodes that were not counted enlarge the shares", "TestNodesComeAndGo TestBelievedCount"},
	{"caddy-field c 1: failed requests eat the slower limit", "TestAllOrNothing"},
	{"caddy-field c 3: one name, two definitions", "TestZoneInTwoPlaces TestCaddyfileErrors"},
	{"caddy-field c 4: thousands slip through between nodes", "TestExactOverNodes"},
	{"caddy-field c 5: Retry-After 0 or untrue", "TestWaitingAsToldSucceeds TestRetryAfterIsTrue TestRefusals"},
	{"caddy-field c 8: placeholders that do not exist", "TestCaddyfileErrors TestKeyErrors"},
	{"caddy-field c 9: an empty key is unlimited", "TestRepeatedKeysAreNoFreshBuckets TestKeyMissing"},
	{"caddy-field c 10: a key with the port", "TestKeyErrors"},
	{"caddy-field c 11: everybody has the proxy's address", "TestOneNetworkIsOneClient"},
	{"caddy-field c 12: rotating X-Forwarded-For", "TestForwardedAddressOfAnUntrustedPeer"},
	{"caddy-field c 13, 14: networks, also inside of keys", "TestOneNetworkIsOneClient TestKeyGroupsAddresses"},
	{"caddy-field c 15: blocks that escalate and end on time", "TestPenaltyTimeline TestBlocks"},
	{"caddy-field c 16: offences are never forgotten", "TestStrikesAreForgotten TestStrikesJustRemembered"},
	{"caddy-field c 19: 0 events panics", "TestErrorsOfProvision TestCaddyfileErrors"},
	{"caddy-field c 20: a lock that is never released", "TestMemoryIsExactUnderConcurrency TestMemoryBoundUnderConcurrency"},
	{"caddy-field c 22: options that do nothing", "TestCaddyfileOptionsAreInGoldenFiles TestCaddyfileReachesAllFields"},
	{"caddy-field c 23: wrong words are ignored", "TestCaddyfileErrors TestOtherWordsAreNoOptions"},
	{"caddy-field c 25, 26, 28: memory grows with keys", "TestMemoryFlood TestMemoryBytesPerBucket TestMemoryBound"},
	{"caddy-field c 33: which key in Redis?", "TestExactOverNodes"},
	{"caddy-field c 36: several handlers, one connection pool", "TestClientsLeaveNothing"},
	{"caddy-field c 38: Caddy does not start without Redis", "TestRedisAbsent"},
	{"caddy-field c 39: nobody notices that it is open", "TestRedisDiesUnderLoad"},
	{"caddy-field c 41: a slow Redis", "TestHangingRedisIsLeftAlone TestSensitiveRouteWaitsForAHiccup"},
	{"caddy-field c 43: passwords in logs and errors", "TestErrorsOfProvision TestRedisSettings"},
	{"caddy-field c 47: an own page for 429", "TestWhoAnswers TestExample"},
	{"caddy-field c 48: do not block, inform the backend", "TestDryRunHeader"},
	{"caddy-field c 50: headers of two handlers", "TestBeforeAndAfterAuth TestNumbersAreSetAndTheRestStays"},
	{"caddy-field c 52: slots and panics", "TestSlotsOverReloadsAndAborts"},
	{"caddy-field c 54: exempt requests are limited", "TestExemptCostsNothing"},
	{"caddy-field c 55: rotating keys, and requests without", "TestRepeatedKeysAreNoFreshBuckets"},
	{"caddy-field c 56: a line for each refusal", "TestLogOfAFlood TestHeavyLogOfAFlood TestRefusalsAtALevel"},
	{"caddy-field c 57: keys in the log", "TestBlocksCanBeLifted"},
	{"caddy-field c 58: logs for fail2ban and CrowdSec", "TestLogsDocsFail2ban TestLogsDocsCrowdSec"},
	{"caddy-field c 62: order, snippets, named routes", "TestBeforeAndAfterAuth TestOneChargeARequest TestCaddyfileAdapts"},
	{"caddy-field c 63: one limit for all sites", "TestPatchOfASharedZone"},
	{"caddy-field c 65: examples that do not load", "TestReadmeCaddyfiles TestReadmeTranscript"},
	{"shedding d 1, 2, 3: the limit is overshot", "TestNeverOneMore TestExactlyTheLimitIsAdmitted"},
	{"shedding d 4, 5: a panic loses a slot", "TestSlotsOverReloadsAndAborts"},
	{"shedding d 14, 15: health checks are shed", "TestSlotsOverReloadsAndAborts"},
	{"shedding d 26: every generation counts for itself", "TestSlotsOverReloadsAndAborts TestPoolSurvivesReloads"},
	{"shedding d 34: 429 or 503", "TestRefusals"},
	{"shedding d 36, 37, 38: retries restart the ban", "TestPenaltyTimeline"},
	{"shedding d 42: the count is never reset", "TestStrikesAreForgotten"},
	{"shedding d 43: bans of one length cycle", "TestPenaltyTimeline"},
	{"shedding d 44: banned again at once", "TestBlocksCanBeLifted"},
	{"shedding d 49: everybody behind one address", "TestGlobalZoneBlocksNobody TestWhoIsStruck"},
	{"shedding d 51: no way to list or lift", "TestBlocksCanBeLifted"},
	{"shedding d 52: an attacker locks out an account", "TestWarnings"},
	{"shedding d 53: a forged address is struck", "TestForwardedAddressOfAnUntrustedPeer TestEarlyDataWithAVictimsAddress"},
	{"shedding d 54: rotation inside of a /64", "TestOneNetworkIsOneClient"},
	{"shedding d 55: blocks after Redis is gone", "TestBlockIsKnownWhileTheStoreIsDown TestRedisDiesUnderLoad"},
	{"shedding d 59: of several limits only one acts", "TestWhoIsStruck TestAllOrNothing"},
}

// The list names tests that are there.
func TestReportsAreAnswered(t *testing.T) {
	files, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	var tests []string
	for _, file := range files {
		if !strings.HasSuffix(file.Name(), "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file.Name(), nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, declaration := range parsed.Decls {
			if f, ok := declaration.(*ast.FuncDecl); ok {
				tests = append(tests, f.Name.Name)
			}
		}
	}
	for _, r := range reports {
		for _, name := range strings.Fields(r.answeredBy) {
			if !slices.Contains(tests, name) {
				t.Errorf("%s: there is no %s", r.report, name)
			}
		}
	}
	t.Logf("%d reports", len(reports))
}
