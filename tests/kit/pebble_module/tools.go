//go:build tools

// Package tools names what tests build beside our own code, so that go.sum pins it.
package tools

import _ "github.com/letsencrypt/pebble/v2/cmd/pebble"
