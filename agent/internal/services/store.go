package services

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"cloche.dev/agent/internal/wire"
)

// maxFile bounds what is read back: whoever is root here can have written it.
const maxFile = maxServices * (MaxSpec + 1024)

// save writes all definitions in one step, onto the disk itself: a machine that
// is cut off starts with the old or the new ones.
func (m *Manager) save(specs []*Spec) error {
	if m.Path == "" {
		return nil
	}
	b, err := json.Marshal(struct {
		Services []*Spec `json:"services"`
	}{specs})
	if err != nil {
		return err
	}
	if len(b) > maxFile {
		return wire.TooLarge("body", "the definitions of all services are too large together")
	}
	if err := os.MkdirAll(filepath.Dir(m.Path), 0o755); err != nil {
		return wire.FromErr(err, "")
	}
	if err := writeFile(m.Path, b); err != nil {
		return wire.FromErr(err, "")
	}
	return nil
}

func writeFile(path string, b []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".services-*.cloche-tmp") // 0600: there may be secrets in it
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return err
	}
	if dir, err := os.Open(filepath.Dir(path)); err == nil {
		_ = dir.Sync()
		_ = dir.Close()
	}
	return nil
}

// load reads the definitions; one that makes no sense is left out.
func (m *Manager) load() []*Spec {
	if m.Path == "" {
		return nil
	}
	f, err := os.Open(m.Path)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			m.Logf("services: %v", err)
		}
		return nil
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		m.Logf("services: %s is not a file", m.Path)
		return nil
	}
	b, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	var kept struct {
		Services []json.RawMessage `json:"services"`
	}
	if err == nil && len(b) <= maxFile {
		err = json.Unmarshal(b, &kept)
	}
	if err != nil || len(b) > maxFile || len(kept.Services) > maxServices {
		m.Logf("services: %s is damaged, and none of it is started", m.Path)
		return nil
	}
	var out []*Spec
	for _, raw := range kept.Services {
		var named struct {
			Name string `json:"name"`
		}
		_ = json.Unmarshal(raw, &named)
		s, err := Parse(named.Name, raw)
		if err != nil {
			m.Logf("services: one definition is damaged: %v", err)
			continue
		}
		out = append(out, s)
	}
	return out
}
