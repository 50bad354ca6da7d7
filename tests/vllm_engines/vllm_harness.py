"""Real vLLM for tests: engines in forks of one process that has imported it, and servers; prompts, comparisons, damage.

Imports neither torch nor vLLM: what runs inside vLLM's processes is :mod:`vllm_child`.
"""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
import uuid
from collections.abc import Sequence
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import numpy as np
from vllm_child import Reply

from maru_bench.servers import MaruServer
from maru_core.pool import Geometry
from maru_core.pool.format import BLOCK_BYTES
from maru_core.session import Session
from support import await_condition

ROOT = Path(__file__).parents[2]
BLOCK = 32
#: What every process of vLLM gets: no look at the network, no report home, and threads that are not bound to cores, since
#: several engines share them here.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


def make_model(kind: str = "wide", seed: int = 0) -> Path:
    """A tiny model of the engine kit with heads that vLLM's CPU attention takes, made once, beside the interpreter."""
    target = Path(sys.prefix) / "maru-models" / f"{kind}-{seed}"
    line = [
        sys.executable,
        "-m",
        "maru_engine_kit.models",
        "make-llama",
        str(target),
        "--size",
        kind,
        "--seed",
        str(seed),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "engine_kit"), os.environ.get("PYTHONPATH", "")]),
    }
    subprocess.run(line, check=True, capture_output=True, text=True, env=environment)
    return target


def transfer_config(extra: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """``--kv-transfer-config``: what a user writes, and no more."""
    return {"kv_connector": "MaruConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra or {}} | fields


def settings(server: MaruServer, **more: Any) -> dict[str, Any]:
    """The connector's extra config for a server of the test's own; slow answers of a busy machine are no faults."""
    return {"server": server.endpoint, "timeout_ms": 5000} | more


class Forks:
    """The process that has imported vLLM; :class:`Engine` makes the forks."""

    def __init__(self, directory: Path) -> None:
        self.address = str(directory / "f")
        self.directory = directory
        environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        with (directory / "forks.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "import sys, vllm_child; vllm_child.main(sys.argv[1])", self.address],
                cwd=Path(__file__).parent, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=environment,
            )  # fmt: skip
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line == b"ready\n":
                return
        raise AssertionError(f"vLLM could not be imported: {(directory / 'forks.log').read_text()[-4000:]}")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class Engine:
    """One ``LLM`` in a process of its own. A context manager; leaving it ends the engine."""

    def __init__(
        self, forks: Forks, model: Path, extra: dict[str, Any] | None = None, *, transfer: dict[str, Any] | None = None,
        plain: bool = False, env: dict[str, str] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """
        Args:
            extra: the connector's ``kv_connector_extra_config``.
            transfer: more fields of ``--kv-transfer-config``.
            plain: without any connector.
            options: more arguments of ``LLM``.
        """
        self.log = forks.directory / f"engine-{uuid.uuid4().hex[:6]}.log"
        fields: dict[str, Any] = {
            "model": str(model), "skip_tokenizer_init": True, "dtype": "bfloat16", "enforce_eager": True, "block_size": BLOCK,
            "max_model_len": 2048, "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20, "disable_log_stats": False, "seed": 0,
        }  # fmt: skip
        if not plain:
            fields["kv_transfer_config"] = transfer_config(extra, **(transfer or {}))
        self._connection = Client(forks.address, "AF_UNIX")
        self._connection.send((self.log, env or {}, fields | options))
        try:
            self._result(300)
        except BaseException:
            self.stop()
            raise

    def run(self, function: str, *arguments: Any, timeout_s: float = 120) -> Any:
        """Run a function of :mod:`vllm_child` in the engine's process."""
        self._connection.send((function, arguments))
        return self._result(timeout_s)

    def _result(self, timeout_s: float) -> Any:
        assert self._connection.poll(timeout_s), f"no answer in {timeout_s:g} s: {self.log_text()[-4000:]}"
        try:
            good, value = self._connection.recv()
        except (EOFError, ConnectionError):
            raise AssertionError(f"the engine's process has ended: {self.log_text()[-4000:]}") from None
        assert good, f"{value}\n{self.log}:\n{self.log_text()[-2000:]}"
        return value

    def ask(
        self, *prompts: Sequence[int], tokens: int = 8, salt: str | None = None, adapter: tuple[str, int, str] | None = None
    ) -> list[Reply]:  # fmt: skip
        replies: list[Reply] = self.run("ask", prompts, tokens, salt, adapter)
        return replies

    def forget(self) -> None:
        self.run("forget")

    def figures(self) -> dict[str, float]:
        found: dict[str, float] = self.run("figures")
        return found

    def external(self, *, all_used: bool = True) -> int:
        """Tokens that requests took from the connector so far, as vLLM counts them.

        Args:
            all_used: nothing that was promised failed or was aborted: vLLM's count of hits is the same then.
        """
        found = self.figures()
        hits, used = found["external_prefix_cache_hits"], found["prompt_tokens_by_source/external_kv_transfer"]
        assert hits == used or not all_used, f"{hits} tokens were promised and {used} used"
        return int(used)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def stop(self) -> None:
        self._connection.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def make_prompt(seed: int, tokens: int) -> list[int]:
    """Token ids that have no prefix in common with those of another seed."""
    choose = random.Random(seed)
    return [10 + seed % 400, *(choose.randrange(10, 500) for _ in range(tokens - 1))]


def blocks_of(tokens: int) -> int:
    """Full blocks of so many tokens."""
    return tokens // BLOCK


def loadable(tokens: int) -> int:
    """Tokens of a prompt that can be loaded: full blocks, and at least one token is always computed."""
    return blocks_of(tokens - 1) * BLOCK


def same(one: Sequence[Reply], other: Sequence[Reply]) -> bool:
    """Whether ids and log probabilities are equal, to the last bit."""
    return [(a.ids, a.logprobs) for a in one] == [(b.ids, b.logprobs) for b in other]


def right_in_steps(engine: Engine, *prompts: list[int], tokens: int = 8) -> tuple[list[Reply], list[Reply]]:
    """What an engine without a connector answers that cuts prompts into the same steps: computed from the start, and with all that
    its own prefix cache has then. On some CPUs vLLM rounds otherwise where a prompt is cut otherwise, with or without Maru."""
    engine.forget()
    cold = engine.ask(*prompts, tokens=tokens)
    return cold, engine.ask(*prompts, tokens=tokens)


def server_figures(endpoint: str) -> dict[str, Any]:
    """What the metadata server says of itself."""
    session = Session(endpoint, name="tests", timeout_s=60)
    try:
        return dict(session.stats())
    finally:
        session.close()


def await_stored(server: MaruServer, blocks: int) -> None:
    """Wait until so many blocks are stored, and see that it is not one more."""

    def there() -> bool:
        figures = server_figures(server.endpoint)
        return bool(figures["objects"] >= blocks and not figures["slots_reserved"])

    await_condition(there, f"{blocks} blocks are stored")
    assert server_figures(server.endpoint)["objects"] == blocks


def overwrite_data(server: MaruServer, share: float = 1.0) -> int:
    """Change every byte of the last ``share`` of what was ever written into a pool's slots, behind the server's back.

    Returns:
        Bytes that were changed.
    """
    with Path("/dev/shm", server.pool_name).open("r+b") as file:
        geometry = Geometry.read(file.read(BLOCK_BYTES))
        with mmap.mmap(file.fileno(), 0) as memory:
            data = np.frombuffer(memory, np.uint8)[geometry.off_data :]
            pages = data[: len(data) // 4096 * 4096].reshape(-1, 4096)
            written = np.flatnonzero(pages.any(axis=1))
            chosen = written[len(written) - round(share * len(written)) :]
            # Signs of the numbers flip, and they stay numbers.
            pages[chosen] ^= np.uint8(0x80)
            del data, pages
    return 4096 * len(chosen)
