#!/usr/bin/env bash
# `make demo`: sets up what it needs, then two real SGLang servers share prefixes through Maru. Writes demo.json and
# demo.png. Uses the GPU of this machine if MARU_SGLANG_PYTHON names an SGLang installation; arguments go to
# `maru-bench prefix-sharing` (--model, --prompts, …).
. "$(dirname "$0")/common.sh"
cd "$ROOT"

"$ROOT/tools/dev_env.sh"
engine="$("$ROOT/tools/sglang_env.sh" | tail -n 1)"
device=()
if [ -z "${MARU_SGLANG_PYTHON:-}" ]; then
  if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
    say "this machine has a GPU: to use it, name the Python of your SGLang in MARU_SGLANG_PYTHON. Going on with the CPU"
  fi
  export CUDA_VISIBLE_DEVICES=""
  device=(--device cpu)
fi
exec "${MARU_VENV:-$ROOT/.venv}/bin/maru-bench" prefix-sharing --python "$engine" "${device[@]}" "$@"
