# `make help` lists the targets.

GOLANGCI_LINT_VERSION := 2.15.0
MODULE := github.com/caddy-tollgate/ratelimit
FUZZTIME ?= 1m

# What `make bench` measures: how many rounds of which length, which scenarios (a regular expression; all), and against whom else
# ("name=command url"). Only a report of all scenarios goes to docs.
ROUNDS ?= 7
DURATION ?= 2s
SCENARIO ?=
BENCH_RIVAL ?=
BENCH_DOCS ?= $(if $(SCENARIO),,$(CURDIR)/docs)
export ROUNDS DURATION SCENARIO BENCH_RIVAL

.PHONY: help tools test test-redis lint xcaddy run soak fuzz bench microbench clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

tools: ## Install redis-server and curl if they are missing
	@.ci/install-tools

test: tools ## Run all tests with the race detector
	@# Tests build Caddy too; with everything compiled before, they do not compile it a second time at the same time.
	go build ./... && go build -race ./...
	go test -race -shuffle=on -timeout 20m ./...
	go test -run Alloc .

test-redis: tools ## Run the tests against Sentinel, Cluster and Redis in trouble
	go test -race -tags redis -count=1 -timeout 20m -run Heavy .

lint: bin/golangci-lint-$(GOLANGCI_LINT_VERSION) ## Check the code, go.mod and go.sum
	$< run --allow-parallel-runners ./...
	go mod tidy -diff
	go vet -tags bench,soak,redis ./...

bin/golangci-lint-$(GOLANGCI_LINT_VERSION):
	GOBIN=$(CURDIR)/bin go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v$(GOLANGCI_LINT_VERSION)
	mv bin/golangci-lint $@

# A module that is not published is replaced by this folder; `off` in place of `direct` keeps Go from looking for it elsewhere.
xcaddy: ## Build Caddy with this module the way users do, and run the README and the example with it
	GOPROXY=$$(go env GOPROXY | tr , '|' | sed 's/|direct$$/|off/') go tool xcaddy build \
		$$(go list -m -f '{{.Version}}' github.com/caddyserver/caddy/v2) --with $(MODULE)=. --output bin/caddy
	bin/caddy list-modules | grep -x http.handlers.rate_limit
	bin/caddy list-modules | grep -x rate_limit
	TOLLGATE_CADDY=$(CURDIR)/bin/caddy go test -count=1 -run 'TestReadme|TestExample' .

run: ## Run Caddy with example.Caddyfile
	go run ./cmd/caddy run --config example.Caddyfile

soak: tools ## Run the tests that take long
	go test -tags soak -run Soak -v -timeout 30m .

fuzz: ## Run every fuzz test for FUZZTIME
	@for name in $$(go test -list '^Fuzz' . | grep '^Fuzz'); do \
		go test -run '^$$' -fuzz "^$$name\$$" -fuzztime $(FUZZTIME) . || exit 1; \
	done

bench: tools ## Measure what it costs against the same Caddy without it: ROUNDS, DURATION, SCENARIO, BENCH_RIVAL
	BENCH_DOCS=$(abspath $(BENCH_DOCS)) go test -tags bench -count=1 -run '^TestBench$$' -v -timeout 4h ./internal/bench

microbench: ## Run the benchmarks of single functions
	go test -run '^$$' -bench . -benchmem .

clean: ## Remove what was built
	rm -rf bin
