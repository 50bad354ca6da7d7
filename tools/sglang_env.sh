#!/usr/bin/env bash
# The environment with the real, unmodified SGLang: `.venv-sglang`, or MARU_SGLANG_ENV. Some 2 minutes and 2.2 GB the
# first time, seconds afterwards. Prints the Python to use as its last line of output.
#
# MARU_SGLANG_PYTHON names the Python of an existing SGLang installation instead (a machine with a GPU): Maru is
# installed into it (and the engine kit, for its models; it does nothing else where there is a GPU).
. "$(dirname "$0")/common.sh"

SGLANG=0.5.23
TORCH=2.13.0
# Maru's own dependencies; the installation below does not resolve any, so as not to change the engine's.
LIGHT=('xxhash>=3.4' 'typer>=0.15' 'rich>=13' 'pyzmq>=26' 'msgspec>=0.19' 'numpy>=1.26' 'prometheus-client>=0.20')
TESTS=('pytest>=8' 'pytest-timeout>=2.3' 'hypothesis>=6.100')
PIP=(-m pip install -q --disable-pip-version-check)

if [ -n "${MARU_SGLANG_PYTHON:-}" ]; then
  "$MARU_SGLANG_PYTHON" -c 'import sglang' 2>/dev/null \
    || die "MARU_SGLANG_PYTHON is $MARU_SGLANG_PYTHON, which cannot import sglang: name a Python that can, or unset it"
  # -P: what counts is what is installed there, not the working directory.
  if ! "$MARU_SGLANG_PYTHON" -P -c "import pathlib, sys, maru_core, maru_engine_kit
sys.exit(pathlib.Path(maru_core.__file__).parents[1] != pathlib.Path('$ROOT'))" 2>/dev/null; then
    say "installing Maru into $MARU_SGLANG_PYTHON"
    "$MARU_SGLANG_PYTHON" "${PIP[@]}" 'setuptools>=84' wheel "${LIGHT[@]}" "${TESTS[@]}"
    "$MARU_SGLANG_PYTHON" "${PIP[@]}" --no-deps --no-build-isolation -e "$ROOT"
    "$MARU_SGLANG_PYTHON" "${PIP[@]}" --no-deps --no-build-isolation -e "$ROOT/engine_kit"
  fi
  echo "$MARU_SGLANG_PYTHON"
  exit 0
fi

VENV="${MARU_SGLANG_ENV:-$ROOT/.venv-sglang}"
lock_environment "$VENV"
STAMP="$(hash_of pyproject.toml tools/sglang_env.sh tools/sglang_requirements.txt tools/common.sh engine_kit/pyproject.toml engine_kit/kit_build.py \
  $(cd "$ROOT" && ls maru_*/*.[ch]))"
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
say "sglang $SGLANG"
"$V" "${PIP[@]}" --no-deps "sglang==$SGLANG" triton==3.5.1 torchvision==0.28.0 compressed-tensors==0.18.0
"$V" "${PIP[@]}" -r "$ROOT/tools/sglang_requirements.txt"
# For hosts that reach the pool over the network; without its dependencies, which are gigabytes of CUDA that nothing here needs.
"$V" "${PIP[@]}" --no-deps nixl==1.5.1 nixl-cu13==1.5.1
say "maru and the engine kit"
"$V" "${PIP[@]}" --no-deps --no-build-isolation -e "$ROOT"
"$V" "${PIP[@]}" --no-deps --no-build-isolation -e "$ROOT/engine_kit"
SGLANG_USE_CPU_ENGINE=1 "$V" -m maru_engine_kit.cli prepare >&2
echo "$STAMP" >"$VENV/.maru-stamp"
echo "$V"
