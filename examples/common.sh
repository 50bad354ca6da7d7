# Shared by the examples: sourced, not run. Which engines and model, and that everything that was started ends.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
DEVICE="${DEVICE:-cpu}"
SGLANG_PYTHON="${SGLANG_PYTHON:-$ROOT/.venv-sglang/bin/python}"
VLLM_PYTHON="${VLLM_PYTHON:-$ROOT/.venv-vllm/bin/python}"
# Only the examples' own; a server that is embedded lives here and ends with its last engine.
RUN="$(mktemp -d /tmp/maru-example-XXXXXX)"
export MARU_RUNTIME_DIR="$RUN" MARU_POOL_SIZE="${MARU_POOL_SIZE:-256M}" MARU_IDLE_EXIT_S=2

PIDS=() NAMES=()
finish() {
  trap - EXIT INT TERM
  for pid in "${PIDS[@]}"; do kill -- "-$pid" 2>/dev/null || true; done
  for pid in "${PIDS[@]}"; do wait "$pid" 2>/dev/null || true; done
  rm -rf "$RUN"
}
trap finish EXIT
trap 'exit 130' INT TERM

say() { printf '== %s\n' "$*"; }

# start NAME COMMAND... : in the background, in a process group of its own, with a log.
start() {
  local name="$1"
  shift
  set -m
  "$@" >"$RUN/$name.log" 2>&1 &
  set +m
  PIDS+=("$!") NAMES+=("$name")
}

# healthy URL : whether a server answers there.
healthy() {
  local address="${1#http://}"
  timeout 30 bash -c 'exec 3<>"/dev/tcp/$0/$1" && printf "GET /health HTTP/1.0\r\nHost: $0\r\n\r\n" >&3 && read -r status <&3 && [[ "$status" == *" 200"* ]]' \
    "${address%:*}" "${address#*:}" 2>/dev/null
}

# await URL : until a server answers. Ends the example if a process of ours has died, with the end of that one's log.
await() {
  local index
  until healthy "$1"; do
    for index in "${!PIDS[@]}"; do
      kill -0 "${PIDS[$index]}" 2>/dev/null || { tail -n 20 "$RUN/${NAMES[$index]}.log"; say "${NAMES[$index]} did not start"; exit 1; }
    done
    sleep 0.5
  done
}

free_port() { "$SGLANG_PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

# model PYTHON SIZE : MODEL, or a model of random weights that is made once.
model() {
  if [ -n "${MODEL:-}" ]; then
    echo "$MODEL"
    return
  fi
  PYTHONPATH="$ROOT/engine_kit" "$1" -m maru_engine_kit.models make-llama "$(dirname "$(dirname "$1")")/maru-models/$2" --size "$2" >&2
  echo "$(dirname "$(dirname "$1")")/maru-models/$2"
}

# What these engines need on a machine without a GPU.
SGLANG_CPU=()
VLLM_CPU=()
if [ "$DEVICE" = cpu ]; then
  export SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES="" VLLM_CPU_OMP_THREADS_BIND=nobind
  SGLANG_CPU=(--device cpu --attention-backend torch_native --disable-cuda-graph --mem-fraction-static 0.2 --max-total-tokens 4096
    --sleep-on-idle --dtype bfloat16 --page-size 16)
  VLLM_CPU=(--dtype bfloat16 --enforce-eager --max-model-len 2048 --kv-cache-memory-bytes 67108864)
fi
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" VLLM_NO_USAGE_STATS=1
