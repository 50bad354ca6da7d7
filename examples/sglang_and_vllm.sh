#!/usr/bin/env bash
# SGLang and vLLM on one metadata server and one pool. They do not load each other's pages, which have other layouts and hashes:
# each has a namespace of its own, and the pool's room is shared.
. "$(dirname "$0")/common.sh"

MODEL="$(model "$VLLM_PYTHON" wide)"
export MARU_SERVER="ipc://$RUN/maru.sock"
start maru-server "$SGLANG_PYTHON" -m maru_server --pool "shm://maru-example-$$" --size 512M --bind "$MARU_SERVER" --unlink-on-exit

A="$(free_port)" B="$(free_port)"
start sglang "$SGLANG_PYTHON" -m sglang.launch_server --model-path "$MODEL" --port "$A" \
  --enable-hierarchical-cache --hicache-storage-backend maru \
  --enable-cache-report --skip-tokenizer-init --skip-server-warmup "${SGLANG_CPU[@]}"
start vllm "$VLLM_PYTHON" -m vllm.entrypoints.openai.api_server --model "$MODEL" --port "$B" --enable-prompt-tokens-details \
  --kv-transfer-config '{"kv_connector": "MaruConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}' "${VLLM_CPU[@]}"
say "starting SGLang and vLLM"
await "http://127.0.0.1:$A"
await "http://127.0.0.1:$B"

say "the same prompt to both"
PYTHONPATH="$ROOT" "$SGLANG_PYTHON" "$ROOT/examples/ask.py" "sglang=http://127.0.0.1:$A" "vllm=http://127.0.0.1:$B"

say "two namespaces, and in which fields they differ"
PYTHONPATH="$ROOT" "$SGLANG_PYTHON" -m maru_server.operator namespaces --diff 0 1
