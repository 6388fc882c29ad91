package redistest

import (
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// alarm waits to a tenth of a millisecond. Timers of Go come as much as a millisecond late when nothing else is to do, which makes
// a distance of one millisecond to two or three; a sleep in the kernel would keep other goroutines from running. The kernel's
// timers can be waited for like connections.
type alarm struct {
	file *os.File
	fd   int // of the file; its method Fd would make it block
}

func newAlarm() (*alarm, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	return &alarm{file: os.NewFile(uintptr(fd), "timer"), fd: fd}, nil
}

// wait waits so long.
func (a *alarm) wait(d time.Duration) error {
	if d <= 0 {
		return nil
	}
	once := unix.ItimerSpec{Value: unix.NsecToTimespec(d.Nanoseconds())}
	if err := unix.TimerfdSettime(a.fd, 0, &once, nil); err != nil {
		return err
	}
	var rings [8]byte
	_, err := a.file.Read(rings[:])
	return err
}

func (a *alarm) close() { a.file.Close() }
