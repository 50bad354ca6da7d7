#!/usr/bin/env bash
# A pool on one side, an SGLang that may not map it on the other, and an agent between them: here over loopback, where UCX takes TCP or shared
# memory. Between hosts, give --bind and --server an address and keys (docs/rdma.md). The environment needs NIXL:
#     .venv-sglang/bin/python -m pip install --no-deps nixl==1.5.1 nixl-cu13==1.5.1
. "$(dirname "$0")/common.sh"

MODEL="$(model "$SGLANG_PYTHON" tiny)"
export MARU_SERVER="ipc://$RUN/maru.sock"
start maru-server "$SGLANG_PYTHON" -m maru_server --pool "shm://maru-example-$$" --size 512M --bind "$MARU_SERVER" --unlink-on-exit
until [ -S "$RUN/maru.sock" ]; do sleep 0.1; done
start maru-agent "$SGLANG_PYTHON" -m maru_agent --server "$MARU_SERVER" --backend ucx

A="$(free_port)" B="$(free_port)"
for port in "$A" "$B"; do
  start "sglang-$port" "$SGLANG_PYTHON" -m sglang.launch_server --model-path "$MODEL" --port "$port" \
    --enable-hierarchical-cache --hicache-storage-backend maru \
    --hicache-storage-backend-extra-config '{"transport": "rdma", "timeout_ms": 2000}' \
    --enable-cache-report --skip-tokenizer-init --skip-server-warmup "${SGLANG_CPU[@]}"
done
say "starting two servers that reach the pool through the agent"
await "http://127.0.0.1:$A"
await "http://127.0.0.1:$B"

say "the same prompt to both"
PYTHONPATH="$ROOT" "$SGLANG_PYTHON" "$ROOT/examples/ask.py" "sglang=http://127.0.0.1:$A" "sglang=http://127.0.0.1:$B"
