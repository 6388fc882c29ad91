package proc

import (
	"bytes"
	"os"
	"testing"
)

func TestResidentGrowsWithWhatIsUsed(t *testing.T) {
	before, err := Resident([]int{os.Getpid()})
	if err != nil || before < 1<<20 {
		t.Fatalf("got %d bytes, error %v", before, err)
	}
	const used = 64 << 20
	block := bytes.Repeat([]byte{1}, used)
	after, err := Resident([]int{os.Getpid()})
	if err != nil || after-before < used/2 {
		t.Errorf("got %d bytes, then %d with %d more in use, error %v", before, after, len(block), err)
	}
	if _, err := Resident([]int{-1}); err == nil {
		t.Error("a process that does not exist: no error")
	}
}

func TestResidentOfWhatIsNoStatus(t *testing.T) {
	if kilobytes, err := parseResident([]byte("Name:\tx\nVmRSS:\t    12 kB\nRssAnon:\t 5 kB\n")); err != nil || kilobytes != 12 {
		t.Errorf("got %d, error %v", kilobytes, err)
	}
	for _, status := range []string{"", "Name:\tkernel thread\n", "VmRSS:\tmuch\n"} {
		if _, err := parseResident([]byte(status)); err == nil {
			t.Errorf("%q: no error", status)
		}
	}
}
