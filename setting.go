package ratelimit

// This file holds values of the configuration that can come from the environment or from a file.

import (
	"encoding/json"
	"errors"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
)

// Setting is a value that may be a placeholder, so it is kept as text. In JSON, a number or a boolean does as well.
type Setting string

// UnmarshalJSON implements json.Unmarshaler. Its errors do not repeat the value, which can be a password.
func (s *Setting) UnmarshalJSON(raw []byte) error {
	text, err := settingText(raw)
	*s = Setting(text)
	return err
}

// DurationSetting is a duration that may be a placeholder. In JSON, a number is nanoseconds; text needs a unit.
type DurationSetting string

// UnmarshalJSON implements json.Unmarshaler.
func (s *DurationSetting) UnmarshalJSON(raw []byte) error {
	text, err := settingText(raw)
	var nanoseconds int64
	if err == nil && text != "" && json.Unmarshal(raw, &nanoseconds) == nil {
		text = time.Duration(nanoseconds).String()
	}
	*s = DurationSetting(text)
	return err
}

var errSetting = errors.New("a setting of redis must be text, a number, true or false, and not empty: leave it out for the default")

// settingText returns what a JSON value is in a Caddyfile; null is nothing.
func settingText(raw []byte) (text string, err error) {
	switch raw[0] {
	case 'n':
		return "", nil
	case '{', '[':
		return "", errSetting
	case '"':
		if err := json.Unmarshal(raw, &text); err != nil || text == "" {
			return "", errSetting
		}
		return text, nil
	}
	return string(raw), nil
}

// hasPlaceholder says whether a value is known only when the configuration loads.
func hasPlaceholder(text string) bool { return strings.Contains(text, "{") }

// isOpen says whether a secret can be read in the configuration itself.
func isOpen(secret string) bool {
	return secret != "" && !strings.Contains(secret, "{env.") && !strings.Contains(secret, "{file.")
}

var errBraces = errors.New(`in braces stands no placeholder that is known when the configuration loads: write {env.NAME}, or {file.…} with the absolute path of a file, and other braces as \{ and \}`)

// expand replaces the placeholders of a value. Errors never repeat the value, which can be a secret, nor what stands in other
// braces, which can be a part of one.
func expand(value string) (string, error) {
	resolved, err := caddy.NewReplacer().ReplaceFunc(value, func(name string, value any) (any, error) {
		switch {
		case caddy.ToString(value) != "":
			return value, nil
		case strings.HasPrefix(name, "env."), strings.HasPrefix(name, "file."):
			return nil, errors.New("evaluated placeholder {" + name + "} is empty")
		}
		return nil, errBraces
	})
	if err == nil && resolved == "" {
		err = errors.New("it is empty")
	}
	return resolved, err
}
