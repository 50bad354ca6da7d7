#!/usr/bin/env bash
# Two SGLang servers on one machine. Nothing of Maru is set up: the first one starts a metadata server and a pool.
. "$(dirname "$0")/common.sh"

MODEL="$(model "$SGLANG_PYTHON" tiny)"
A="$(free_port)" B="$(free_port)"
for port in "$A" "$B"; do
  start "sglang-$port" "$SGLANG_PYTHON" -m sglang.launch_server --model-path "$MODEL" --port "$port" \
    --enable-hierarchical-cache --hicache-storage-backend maru \
    --enable-cache-report --skip-tokenizer-init --skip-server-warmup "${SGLANG_CPU[@]}"
done
say "starting two servers"
await "http://127.0.0.1:$A"
await "http://127.0.0.1:$B"

say "the same prompt to both"
PYTHONPATH="$ROOT" "$SGLANG_PYTHON" "$ROOT/examples/ask.py" "sglang=http://127.0.0.1:$A" "sglang=http://127.0.0.1:$B"

say "what Maru has of it"
PYTHONPATH="$ROOT" "$SGLANG_PYTHON" -m maru_server.operator status
