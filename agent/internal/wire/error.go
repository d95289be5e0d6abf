package wire

import (
	"encoding/json"
	"errors"
	"io/fs"
	"net/http"
	"strconv"
	"syscall"
)

// Error is the JSON body of every answer that is not a success.
type Error struct {
	Status  int    `json:"-"`
	Code    string `json:"code"`
	Message string `json:"message"`
	Errno   string `json:"errno,omitempty"`
	Field   string `json:"field,omitempty"`
	// At is the path that is in the way, when it is not the one asked for.
	At    string `json:"at,omitempty"`
	AtB64 string `json:"at_b64,omitempty"`
	// Done is how far a call has come that changed something before it failed.
	Done any `json:"done,omitempty"`
}

func (e *Error) Error() string { return e.Message }

// BadRequest says that the named field of a request is malformed.
func BadRequest(field, message string) *Error {
	return &Error{Status: http.StatusBadRequest, Code: "bad_request", Message: message, Field: field}
}

// NotFound says that what the named field refers to does not exist.
func NotFound(field, message string) *Error {
	return &Error{Status: http.StatusNotFound, Code: "not_found", Message: message, Field: field}
}

// Conflict is a 409 with one of its codes.
func Conflict(code, field, message string) *Error {
	return &Error{Status: http.StatusConflict, Code: code, Message: message, Field: field}
}

// TooLarge says that the named field is over a limit of the kernel.
func TooLarge(field, message string) *Error {
	return &Error{Status: http.StatusRequestEntityTooLarge, Code: "too_large", Message: message, Field: field}
}

// Exhausted says that it is not possible now, and may be later.
func Exhausted(message string) *Error {
	return &Error{Status: http.StatusServiceUnavailable, Code: "exhausted", Message: message}
}

// ErrSessionLost is why a request is over whose session with the host has
// ended.
var ErrSessionLost = errors.New("the session with the host is lost")

type class struct {
	status  int
	code    string
	message string
}

var classes = map[syscall.Errno]class{
	syscall.ENOENT:       {404, "not_found", "no such file or directory"},
	syscall.EACCES:       {403, "permission_denied", "permission denied"},
	syscall.EPERM:        {403, "permission_denied", "operation not permitted"},
	syscall.EROFS:        {403, "permission_denied", "read-only file system"},
	syscall.EEXIST:       {409, "exists", "it exists already"},
	syscall.EISDIR:       {409, "is_directory", "it is a directory"},
	syscall.ENOTDIR:      {409, "not_a_directory", "a part of the path is not a directory"},
	syscall.ENOTEMPTY:    {409, "not_empty", "the directory is not empty"},
	syscall.ETXTBSY:      {409, "text_busy", "the program is being run"},
	syscall.EBUSY:        {409, "conflict", "it is in use"},
	syscall.ELOOP:        {409, "conflict", "too many symbolic links"},
	syscall.EINVAL:       {409, "conflict", "not possible for this path"},
	syscall.ENXIO:        {409, "not_a_regular_file", "it is not a regular file"},
	syscall.ENODEV:       {409, "not_a_regular_file", "it is not a regular file"},
	syscall.ENAMETOOLONG: {413, "too_large", "the name is too long"},
	syscall.E2BIG:        {413, "too_large", "arguments and environment are too long"},
	syscall.EFBIG:        {413, "too_large", "the file is too large"},
	syscall.ENOSPC:       {507, "no_space", "no space left on the disk"},
	syscall.EDQUOT:       {507, "no_space", "the disk quota is used up"},
	syscall.EAGAIN:       {503, "exhausted", "no more processes can be started"},
	syscall.ENOMEM:       {503, "exhausted", "no memory left"},
	syscall.EMFILE:       {503, "exhausted", "no file descriptors left"},
	syscall.ENFILE:       {503, "exhausted", "no file descriptors left"},
}

// FromErr turns an error of the kernel into an answer about the named field.
// Errors that are answers already are left alone.
func FromErr(err error, field string) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	var no syscall.Errno
	if !errors.As(err, &no) {
		if errors.Is(err, fs.ErrNotExist) {
			no = syscall.ENOENT
		} else {
			return &Error{Status: http.StatusInternalServerError, Code: "internal", Message: err.Error(), Field: field}
		}
	}
	if c, ok := classes[no]; ok {
		return &Error{Status: c.status, Code: c.code, Message: c.message, Errno: ErrnoName(no), Field: field}
	}
	return &Error{Status: http.StatusInternalServerError, Code: "internal", Message: no.Error(), Errno: ErrnoName(no), Field: field}
}

// WriteTo sends the error as the whole answer.
func (e *Error) WriteTo(w http.ResponseWriter) {
	body, err := json.Marshal(e)
	if err != nil {
		body = []byte(`{"code":"internal","message":"the error could not be written"}`)
	}
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	h["Date"] = nil
	w.WriteHeader(e.Status)
	_, _ = w.Write(body)
}
