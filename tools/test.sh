#!/usr/bin/env bash
# `make test`: the environments, lint, the tests that need no engine in `.venv`, those that do with SGLang's Python and with
# vLLM's. Says why each skipped test was skipped; the last line is the total of all. `tools/test.sh vllm` runs the part with
# vLLM alone.
. "$(dirname "$0")/common.sh"
cd "$ROOT"
PART="${1:-all}"
[ "$PART" = all ] || [ "$PART" = vllm ] || die "no part $PART: leave it out, or name vllm"

"$ROOT/tools/dev_env.sh"
LIGHT="${MARU_VENV:-$ROOT/.venv}/bin/python"
REPORTS="$(mktemp -d)"
beside=""
trap '[ -z "$beside" ] || kill "$beside" 2>/dev/null; rm -rf "$REPORTS"' EXIT
failed=""
# Much of both halves is waiting: at once they take little longer than one. What is new comes into the other.
BESIDE=(tests/simulation tests/fuzz tests/bench tests/docs tests/operator)

if [ "$PART" = all ]; then
  "$ROOT/tools/browser.sh" || say "without a browser the live page is not tested"

  # Without it the tests of take-over between hosts would be skipped, and nobody would notice.
  if [ -z "${MARU_NO_ETCD:-}" ] && ! MARU_ETCD="$("$ROOT/tools/etcd.sh" | tail -n 1)"; then
    say "there is no etcd for the tests: see above, or leave them out with MARU_NO_ETCD=1"
    failed="$failed etcd"
  fi
  [ -z "${MARU_ETCD:-}" ] || export MARU_ETCD

  "$ROOT/tools/lint.sh" || failed="$failed lint"

  say "tests without an engine, two halves at once"
  half=("$LIGHT" -m pytest -m "not sglang and not vllm and not rack and not slow" -o junit_family=xunit2)
  "${half[@]}" --junitxml "$REPORTS/beside.xml" "${BESIDE[@]}" >"$REPORTS/beside.log" 2>&1 &
  beside=$!
  "${half[@]}" --junitxml "$REPORTS/light.xml" "${BESIDE[@]/#/--ignore=}" || failed="$failed light"
  wait "$beside" || failed="$failed beside"
  beside=""
  say "the other half: ${BESIDE[*]}"
  cat "$REPORTS/beside.log"

  # Its machines load both cores: after the rest, not beside it.
  if [ -n "${MARU_NO_RACK:-}" ]; then
    say "tests on virtual machines are left out: MARU_NO_RACK is set"
  else
    say "tests on virtual machines"
    "$LIGHT" -m pytest tests/rack -m "rack and not slow" --junitxml "$REPORTS/rack.xml" -o junit_family=xunit2 || failed="$failed rack"
  fi

  if [ -z "${MARU_SGLANG_PYTHON:-}" ]; then
    # Ours is for CPUs: a GPU that is there would only mislead it.
    export CUDA_VISIBLE_DEVICES=""
    export SGLANG_USE_CPU_ENGINE=1
  fi
  if engine="$("$ROOT/tools/sglang_env.sh" | tail -n 1)" && [ -n "$engine" ]; then
    say "tests with SGLang ($engine)"
    "$engine" -m pytest tests/sglang tests/engines tests/kernels -m "sglang and not slow" --junitxml "$REPORTS/sglang.xml" -o junit_family=xunit2 \
      || failed="$failed sglang"
  else
    failed="$failed sglang-environment"
  fi
fi

if engine="$(tools/vllm_env.sh | tail -n 1)" && [ -n "$engine" ]; then
  say "tests with vLLM ($engine)"
  # The environment of the project's own is for CPUs: a GPU that is there would only mislead it.
  (
    [ -n "${MARU_VLLM_PYTHON:-}" ] || export CUDA_VISIBLE_DEVICES=""
    exec "$engine" -m pytest tests/vllm tests/vllm_engines -m "vllm and not slow" --junitxml "$REPORTS/vllm.xml" -o junit_family=xunit2
  ) || failed="$failed vllm"
else
  failed="$failed vllm-environment"
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
