package node

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
)

// binaryVariable names the environment variable that says which Caddy to run in place of one that is built: to test what
// somebody else has built.
const binaryVariable = "TOLLGATE_CADDY"

// program is what users run.
const program = "./cmd/caddy"

// binary and raceBinary build the Caddy of this module, once in a test binary, and return where it is.
var (
	binary = sync.OnceValues(func() (string, error) {
		if path := os.Getenv(binaryVariable); path != "" {
			return path, nil
		}
		return build("caddy", program)
	})
	raceBinary = sync.OnceValues(func() (string, error) { return build("caddy-race", program, "-race") })
)

// build leaves its result in the module's bin folder, not in a temporary one: the next test binary then finds it up to
// date and does not link it again, and there is no last user who must remove it.
func build(name, pkg string, flags ...string) (string, error) {
	gomod, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("finding the module: %w", err)
	}
	root := filepath.Dir(strings.TrimSpace(string(gomod)))
	path := filepath.Join(root, "bin", "test", name)
	unlock, err := lock(path + ".lock")
	if err != nil {
		return "", err
	}
	defer unlock()
	cmd := exec.Command("go", append(append([]string{"build"}, flags...), "-o", path, pkg)...)
	cmd.Dir = root
	if output, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building %s: %w\n%s", name, err, output)
	}
	return path, nil
}

// lock keeps the test binaries of several packages, which run at the same time, from building into one file.
func lock(path string) (unlock func(), err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	file, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX); err != nil {
		file.Close()
		return nil, fmt.Errorf("locking %s: %w", path, err)
	}
	return func() { file.Close() }, nil
}
