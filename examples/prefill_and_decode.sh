#!/usr/bin/env bash
# One vLLM computes prompts and stores their KV, another one loads it and answers. They do not know each other; a proxy sends each prompt
# first to the one and then to the other.
. "$(dirname "$0")/common.sh"

MODEL="$(model "$VLLM_PYTHON" wide)"
export MARU_SERVER="ipc://$RUN/maru.sock"
start maru-server "$VLLM_PYTHON" -m maru_server --pool "shm://maru-example-$$" --size 512M --bind "$MARU_SERVER" --unlink-on-exit

PREFILL="$(free_port)" DECODE="$(free_port)" PROXY="$(free_port)"
start prefill "$VLLM_PYTHON" -m vllm.entrypoints.openai.api_server --model "$MODEL" --port "$PREFILL" \
  --kv-transfer-config '{"kv_connector": "MaruConnector", "kv_role": "kv_producer"}' "${VLLM_CPU[@]}"
start decode "$VLLM_PYTHON" -m vllm.entrypoints.openai.api_server --model "$MODEL" --port "$DECODE" --enable-prompt-tokens-details \
  --kv-transfer-config '{"kv_connector": "MaruConnector", "kv_role": "kv_consumer", "kv_load_failure_policy": "recompute"}' "${VLLM_CPU[@]}"
start proxy "$VLLM_PYTHON" "$ROOT/examples/pd_proxy.py" --port "$PROXY" --prefill "http://127.0.0.1:$PREFILL" --decode "http://127.0.0.1:$DECODE"
say "starting a server that computes prompts and one that answers"
await "http://127.0.0.1:$PREFILL"
await "http://127.0.0.1:$DECODE"
await "http://127.0.0.1:$PROXY"

say "a prompt through the proxy: the server that answers loads what the other one has computed"
PYTHONPATH="$ROOT" "$VLLM_PYTHON" "$ROOT/examples/ask.py" "vllm=http://127.0.0.1:$PROXY"
