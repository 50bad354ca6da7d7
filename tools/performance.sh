#!/usr/bin/env bash
# Every figure of docs/performance.md and docs/benchmarks.md, by the commands that make them, into a directory: two to three hours on a
# machine that does nothing else, in sections that can be run one by one. What is there is not done again.
#
#   tools/performance.sh --list                              the sections, and how long each takes
#   tools/performance.sh DIR [SECTION...] [--again]          run them; `peers`, `growth`, `engines`, `long` are groups of sections
#   tools/performance.sh --short DIR [SECTION...]            all of it in small, to see that it runs: minutes
#   tools/performance.sh --docs DIR [--into FILE]            the results into the tables of docs/performance.md
#
# The environments are brought up to date first; with MARU_NO_ENV=1 they are taken as they are.
. "$(dirname "$0")/common.sh"
cd "$ROOT"

V="${MARU_VENV:-$ROOT/.venv}/bin/python"
if [ -z "${MARU_NO_ENV:-}" ]; then
  tools/dev_env.sh >&2
  case " $* " in
    *" --docs "* | *" --list "*) ;;
    *) for need in $("$V" tools/performance.py --needs "$@"); do "tools/${need}_env.sh" >&2; done ;;
  esac
fi
exec "$V" tools/performance.py "$@"
