package wire

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http/httptest"
	"os"
	"syscall"
	"testing"
)

func TestFromErr(t *testing.T) {
	tests := []struct {
		err    error
		status int
		code   string
		errno  string
	}{
		{syscall.ENOENT, 404, "not_found", "ENOENT"},
		{&os.PathError{Err: syscall.EACCES}, 403, "permission_denied", "EACCES"},
		{syscall.EISDIR, 409, "is_directory", "EISDIR"},
		{syscall.ENAMETOOLONG, 413, "too_large", "ENAMETOOLONG"},
		{syscall.ENOSPC, 507, "no_space", "ENOSPC"},
		{syscall.EDQUOT, 507, "no_space", "EDQUOT"},
		{fmt.Errorf("fork: %w", syscall.EAGAIN), 503, "exhausted", "EAGAIN"},
		{syscall.EIO, 500, "internal", "EIO"},
		{errors.New("what"), 500, "internal", ""},
		{fmt.Errorf("in: %w", BadRequest("x", "y")), 400, "bad_request", ""},
	}
	for _, tt := range tests {
		e := FromErr(tt.err, "path")
		if e.Status != tt.status || e.Code != tt.code || e.Errno != tt.errno {
			t.Errorf("%v: got %d %s %s", tt.err, e.Status, e.Code, e.Errno)
		}
	}
}

func TestWriteTo(t *testing.T) {
	rec := httptest.NewRecorder()
	FromErr(syscall.ENOENT, "cwd").WriteTo(rec)
	var e Error
	if err := json.Unmarshal(rec.Body.Bytes(), &e); err != nil {
		t.Fatal(err)
	}
	if rec.Code != 404 || e.Field != "cwd" || rec.Header().Get("Content-Type") != "application/json" {
		t.Errorf("got %d %+v", rec.Code, e)
	}
}

func TestSignalNames(t *testing.T) {
	if got := SignalName(syscall.SIGSEGV); got != "SIGSEGV" {
		t.Error(got)
	}
	if got := SignalName(34); got != "SIGRTMIN+2" {
		t.Error(got)
	}
}
