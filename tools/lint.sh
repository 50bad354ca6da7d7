#!/usr/bin/env bash
# ruff, its formatter, mypy --strict.
. "$(dirname "$0")/common.sh"
cd "$ROOT"
V="${MARU_VENV:-$ROOT/.venv}/bin/python"
"$V" -m ruff check .
"$V" -m ruff format --check .
"$V" -m mypy
"$V" -m mypy --strict --ignore-missing-imports engine_kit/maru_engine_kit
