#!/usr/bin/env bash
# `make rack`: the tests on virtual machines, and where their logs are. `tools/rack.sh shell GUEST`: a shell in one of the machines.
. "$(dirname "$0")/common.sh"
cd "$ROOT"
PYTHON="${MARU_VENV:-$ROOT/.venv}/bin/python"

"$ROOT/tools/rack_env.sh" >/dev/null
case "${1:-test}" in
  test)
    status=0
    MARU_NEED_RACK=1 "$PYTHON" -m pytest tests/rack -m "rack and not slow" || status=$?
    say "logs are in ${MARU_RACK_LOGS:-${MARU_RACK:-$ROOT/.rack}/logs}"
    exit "$status"
    ;;
  shell) exec "$PYTHON" -m tests.rack.shell "${2:-gpu}" ;;
  *) die "no $1: leave it out, or say shell GUEST" ;;
esac
