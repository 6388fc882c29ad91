package ratelimit

import (
	"context"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"github.com/caddyserver/caddy/v2"
)

func provisionedApp(t testing.TB) *App {
	t.Helper()
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	t.Cleanup(cancel)
	a := new(App)
	if err := a.Provision(ctx); err != nil {
		t.Fatal(err)
	}
	return a
}

// started starts an app; stopped and cleaned end it.
func started(t *testing.T, a *App) *App {
	t.Helper()
	if err := a.Start(); err != nil {
		t.Fatal(err)
	}
	return a
}

func stopped(t *testing.T, a *App) {
	t.Helper()
	if err := a.Stop(); err != nil {
		t.Error(err)
	}
}

func cleaned(t *testing.T, a *App) {
	t.Helper()
	if err := a.Cleanup(); err != nil {
		t.Error(err)
	}
}

// Operators see the configuration that is served, whatever became of others meanwhile.
func TestAdminSeesWhatIsServed(t *testing.T) {
	sees := func(why string, want *App) {
		t.Helper()
		if got := running.Load(); got != want {
			t.Errorf("%s: another app is taken for the one that runs: %p, want %p", why, got, want)
		}
	}
	first := started(t, provisionedApp(t))
	cleaned(t, provisionedApp(t))
	sees("a configuration was validated", first)

	rejected := started(t, provisionedApp(t))
	stopped(t, rejected)
	cleaned(t, rejected)
	sees("another app failed to start", first)

	cleaned(t, started(t, provisionedApp(t)))
	sees("rejected after everything was started", first)

	second := started(t, provisionedApp(t))
	stopped(t, first)
	cleaned(t, first)
	sees("a reload", second)
	stopped(t, second)
	cleaned(t, second)
	sees("the end", nil)
}

// A request to the admin endpoint may have found an app that is on its way out.
func TestAdminDuringReload(t *testing.T) {
	old := started(t, provisionedApp(t))
	var requests sync.WaitGroup
	for range 4 {
		requests.Go(func() {
			for range 100 {
				r := httptest.NewRequest(http.MethodGet, "/rate_limit/blocks", nil)
				if _, err := listBlocks(r.Context(), old, r); err != nil {
					t.Error(err)
				}
			}
		})
	}
	stopped(t, old)
	cleaned(t, old)
	requests.Wait()
}
