package redistest

import (
	"bytes"
	"strconv"
	"strings"
)

// commandCounter finds the commands in what a Redis client sends: arrays of bulk strings, cut into chunks anywhere.
type commandCounter struct {
	header []byte // the part of a header line that has come
	skip   int    // bytes still to come of the present argument, with its line end
	args   int    // arguments still to come, the present one included
	named  bool   // the first argument has come
	name   []byte // the part of the first argument that has come, at most maxName bytes
}

// maxName is longer than the name of any command, with its line end.
const maxName = 32

// feed takes the next chunk and returns the names of the commands that ended in it, in lower case.
func (c *commandCounter) feed(chunk []byte) (commands []string) {
	for len(chunk) > 0 {
		if c.skip > 0 {
			n := min(c.skip, len(chunk))
			c.keepName(chunk[:n])
			c.skip, chunk = c.skip-n, chunk[n:]
			if c.skip == 0 && c.argument() {
				commands = append(commands, strings.ToLower(string(bytes.TrimSpace(c.name))))
			}
			continue
		}
		line, rest, complete := bytes.Cut(chunk, []byte{'\n'})
		c.header, chunk = append(c.header, line...), rest
		if complete {
			c.line(bytes.TrimSuffix(c.header, []byte{'\r'}))
			c.header = c.header[:0]
		}
	}
	return commands
}

// keepName takes a part of an argument, and keeps it if it is one of the name.
func (c *commandCounter) keepName(part []byte) {
	if !c.named {
		c.name = append(c.name, part[:min(len(part), maxName-len(c.name))]...)
	}
}

// argument notes the end of an argument and says whether it was the last of its command.
func (c *commandCounter) argument() bool {
	c.args--
	c.named = true
	return c.args == 0
}

// line reads a header: *3 begins a command of three arguments, $5 an argument of five bytes. What is neither, like the
// bytes of TLS, is not counted.
func (c *commandCounter) line(header []byte) {
	if len(header) < 2 {
		return
	}
	n, err := strconv.Atoi(string(header[1:]))
	if err != nil || n < 0 {
		return
	}
	switch {
	case header[0] == '*':
		c.args, c.named, c.name = n, false, c.name[:0]
	case header[0] == '$' && c.args > 0:
		c.skip = n + len("\r\n")
	}
}
