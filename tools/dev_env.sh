#!/usr/bin/env bash
# The light environment `.venv`: Maru with its development tools, no torch, no engine. Repeatable; seconds if done.
. "$(dirname "$0")/common.sh"

VENV="${MARU_VENV:-$ROOT/.venv}"
lock_environment "$VENV"
STAMP="$(hash_of pyproject.toml tools/dev_env.sh tools/common.sh $(cd "$ROOT" && ls maru_*/*.[ch]))"
if up_to_date "$VENV" "$STAMP"; then
  exit 0
fi
say "building $VENV"
new_environment "$VENV" "$(find_python)"
"$VENV/bin/python" -m pip install -q --disable-pip-version-check 'setuptools>=84' wheel
(cd "$ROOT" && "$VENV/bin/python" -m pip install -q --disable-pip-version-check --no-build-isolation -e '.[dev]')
# Without its dependencies, which are gigabytes of CUDA that nothing here needs.
"$VENV/bin/python" -m pip install -q --disable-pip-version-check --no-deps nixl==1.5.1 nixl-cu13==1.5.1
echo "$STAMP" >"$VENV/.maru-stamp"
