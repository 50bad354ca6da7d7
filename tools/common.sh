# Shared by the environment scripts: sourced, not run.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

say() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }
die() { say "$@"; exit 1; }

# A Python that all of it runs on, 3.11 if there is one; PYTHON comes first.
find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.11 python3.12 python3; do
    if command -v "$candidate" >/dev/null 2>&1 \
      && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "no Python 3.11 to 3.13 found: install python3.11 with python3-venv, or name one in PYTHON"
}

# hash_of FILE... : one hash of the contents (and of which files there are).
hash_of() { (cd "$ROOT" && sha256sum "$@") | sha256sum | cut -c1-32; }

# One process at a time per environment; a second one waits and then finds the work done.
lock_environment() {
  mkdir -p "$(dirname "$1")"
  exec 9>"$1.lock"
  flock -n 9 || { say "waiting for another process that is building $1"; flock 9; }
}

up_to_date() { [ -x "$1/bin/python" ] && [ "$(cat "$1/.maru-stamp" 2>/dev/null)" = "$2" ]; }

# new_environment DIR PYTHON : a fresh one, unless DIR is one already and of the same Python.
new_environment() {
  if [ -x "$1/bin/python" ] && "$1/bin/python" -c 'pass' 2>/dev/null; then
    rm -f "$1/.maru-stamp"
    return
  fi
  rm -rf "$1"
  "$2" -m venv "$1" || die "cannot make $1: install the venv module (Debian: apt-get install python3-venv)"
}
