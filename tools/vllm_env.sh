#!/usr/bin/env bash
# The environment with the real, unmodified vLLM (its build for CPUs): `.venv-vllm`, or MARU_VLLM_ENV. Some 3 minutes and
# 2.3 GB the first time, seconds afterwards. Prints the Python to use as its last line of output.
#
# MARU_VLLM_PYTHON names the Python of an existing vLLM installation instead (a machine with a GPU): Maru is installed
# into it.
. "$(dirname "$0")/common.sh"

TORCH=2.13.0
TRITON=3.5.1
# Maru's own dependencies; the installation below does not resolve any, so as not to change the engine's.
LIGHT=('xxhash>=3.4' 'typer>=0.15' 'rich>=13' 'pyzmq>=26' 'msgspec>=0.19' 'numpy>=1.26' 'prometheus-client>=0.20')
TESTS=('pytest>=8' 'pytest-timeout>=2.3' 'hypothesis>=6.100')
PIP=(-m pip install -q --disable-pip-version-check)

if [ -n "${MARU_VLLM_PYTHON:-}" ]; then
  "$MARU_VLLM_PYTHON" -c 'import vllm' 2>/dev/null \
    || die "MARU_VLLM_PYTHON is $MARU_VLLM_PYTHON, which cannot import vllm: name a Python that can, or unset it"
  # -P: what counts is what is installed there, not the working directory.
  if ! "$MARU_VLLM_PYTHON" -P -c "import pathlib, sys, maru_core, pytest, pytest_timeout
from importlib.metadata import entry_points
sys.exit(pathlib.Path(maru_core.__file__).parents[1] != pathlib.Path('$ROOT')
         or not any(point.name == 'maru' for point in entry_points(group='vllm.general_plugins')))" 2>/dev/null; then
    say "installing Maru into $MARU_VLLM_PYTHON"
    "$MARU_VLLM_PYTHON" "${PIP[@]}" "${LIGHT[@]}" "${TESTS[@]}"
    # Built apart: vLLM pins a setuptools that is older than what Maru's extensions need.
    "$MARU_VLLM_PYTHON" "${PIP[@]}" --no-deps -e "$ROOT"
  fi
  echo "$MARU_VLLM_PYTHON"
  exit 0
fi

VENV="${MARU_VLLM_ENV:-$ROOT/.venv-vllm}"
lock_environment "$VENV"
STAMP="$(hash_of pyproject.toml tools/vllm_env.sh tools/vllm_requirements.txt tools/common.sh $(cd "$ROOT" && ls maru_*/*.[ch]))"
if up_to_date "$VENV" "$STAMP"; then
  echo "$VENV/bin/python"
  exit 0
fi

say "building $VENV (some minutes)"
new_environment "$VENV" "$(find_python)"
V="$VENV/bin/python"
"$V" "${PIP[@]}" 'setuptools>=84' wheel
say "torch $TORCH"
"$V" "${PIP[@]}" "torch==$TORCH"
say "vllm"
"$V" "${PIP[@]}" --no-deps -r "$ROOT/tools/vllm_requirements.txt"
# For the kernels in Triton's interpreter. Apart from the rest: vLLM's build for CPUs has its own ideas of a Triton that is there.
say "triton $TRITON"
"$V" "${PIP[@]}" --no-deps --upgrade --target "$VENV/maru-triton" "triton==$TRITON"
say "maru"
"$V" "${PIP[@]}" --no-deps --no-build-isolation -e "$ROOT"
# Fails here, and not in every test, where a package is missing.
VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=ERROR "$V" -c 'import vllm.entrypoints.openai.api_server' >&2 \
  || die "vLLM cannot be imported in $VENV: see above"
echo "$STAMP" >"$VENV/.maru-stamp"
echo "$V"
