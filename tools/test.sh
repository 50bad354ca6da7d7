#!/usr/bin/env bash
# `make test`: both environments, lint, the tests that need no engine in `.venv`, those that do with SGLang's Python.
# Says why each skipped test was skipped; the last line is the total of both.
. "$(dirname "$0")/common.sh"
cd "$ROOT"

"$ROOT/tools/dev_env.sh"
LIGHT="${MARU_VENV:-$ROOT/.venv}/bin/python"
REPORTS="$(mktemp -d)"
trap 'rm -rf "$REPORTS"' EXIT
failed=""

"$ROOT/tools/lint.sh" || failed="$failed lint"

say "tests without an engine"
"$LIGHT" -m pytest -m "not sglang and not slow" --junitxml "$REPORTS/light.xml" -o junit_family=xunit2 || failed="$failed light"

if [ -z "${MARU_SGLANG_PYTHON:-}" ]; then
  # Ours is for CPUs: a GPU that is there would only mislead it.
  export CUDA_VISIBLE_DEVICES=""
  export SGLANG_USE_CPU_ENGINE=1
fi
if engine="$("$ROOT/tools/sglang_env.sh" | tail -n 1)" && [ -n "$engine" ]; then
  say "tests with SGLang ($engine)"
  "$engine" -m pytest -m "sglang and not slow" --junitxml "$REPORTS/sglang.xml" -o junit_family=xunit2 \
    || failed="$failed sglang"
else
  failed="$failed sglang-environment"
fi

[ -z "$failed" ] || say "FAILED:$failed"
"$LIGHT" - "$REPORTS" "$failed" <<'PY'
import pathlib
import sys
import xml.etree.ElementTree as tree

folder, failed = sys.argv[1:]
total = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
for report in sorted(pathlib.Path(folder).glob("*.xml")):
    for suite in tree.parse(report).getroot().iter("testsuite"):
        for name in total:
            total[name] += int(suite.get(name, 0))
bad = total["failures"] + total["errors"]
print(f"{total['tests'] - bad - total['skipped']} passed, {bad} failed, {total['skipped']} skipped")
sys.exit(1 if bad or failed else 0)
PY
