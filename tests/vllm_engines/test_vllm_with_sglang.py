"""vLLM and SGLang on one Maru server and one pool, with the same model and the same prompts: each finds its own pages."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_harness import ROOT, Engine, Forks, blocks_of, loadable, make_prompt, same, server_figures, settings

from maru_bench.servers import MaruServer, SGLangOptions, SGLangServer
from support import await_condition

pytestmark = [pytest.mark.vllm, pytest.mark.server, pytest.mark.timeout(420)]

PROMPT = 1000
#: Prompts of this length that fill the pool twice over.
FLOOD = 32


def sglang_python() -> str:
    named = os.environ.get("MARU_SGLANG_PYTHON")
    python = named or str(Path(os.environ.get("MARU_SGLANG_ENV", ROOT / ".venv-sglang"), "bin/python"))
    if (
        subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode
        if Path(python).exists()
        else True
    ):
        pytest.skip(f"SGLang's Python is not there ({python}): make sglang-env")
    return python


@pytest.fixture
def small_server() -> Iterator[MaruServer]:
    """Its pool has room for some sixteen of these prompts."""
    with (
        tempfile.TemporaryDirectory(prefix="maru-vllm-") as directory,
        MaruServer(Path(directory), size="24M") as server,
    ):
        yield server


@pytest.fixture
def sglang(model: Path, small_server: MaruServer, tmp_path: Path) -> Iterator[SGLangServer]:
    options = SGLangOptions(
        python=sglang_python(),
        model=str(model),
        page_size=32,
        extra_config={"server": small_server.endpoint, "timeout_ms": 5000},
        env={"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    server = SGLangServer("SGLang", options, tmp_path / "sglang.log")
    server.start()
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def test_each_finds_its_own_pages(forks: Forks, model: Path, small_server: MaruServer, sglang: SGLangServer) -> None:
    prompt = make_prompt(1, PROMPT)

    def objects() -> int:
        return int(server_figures(small_server.endpoint)["objects"])

    with Engine(forks, model, settings(small_server)) as vllm:
        # vLLM stores; SGLang finds nothing of that, and stores its own.
        cold = vllm.ask(prompt)
        await_condition(lambda: objects() == blocks_of(PROMPT), "vLLM's blocks are stored")
        theirs = sglang.generate(prompt, 8)
        assert theirs.cached_tokens == 0
        sglang.flush()
        await_condition(lambda: objects() >= 2 * blocks_of(PROMPT), "SGLang's pages are stored beside them")
        assert server_figures(small_server.endpoint)["namespaces"] == 2
        # Both load their own.
        again = sglang.generate(prompt, 8)
        assert again.storage_tokens == loadable(PROMPT)
        assert (again.output_ids, again.logprobs) == (theirs.output_ids, theirs.logprobs)
        vllm.forget()
        loaded = vllm.ask(prompt)
        assert (loaded[0].cached, vllm.external()) == (loadable(PROMPT), loadable(PROMPT))
        assert same(loaded, cold)

        # vLLM writes more than the pool holds. What nobody used goes, whoever's it is; what SGLang keeps using stays.
        for seed in range(100, 100 + FLOOD):
            vllm.ask(make_prompt(seed, PROMPT), tokens=1)
            if seed % 4 == 0:
                sglang.flush()
                assert sglang.generate(prompt, 8).storage_tokens == loadable(PROMPT), f"gone after {seed - 100} prompts"
        vllm.run("drain")
        figures = server_figures(small_server.endpoint)
        assert figures["evicted_objects"] > 0
        vllm.forget()
        before = vllm.external()
        vllm.ask(prompt)
        assert vllm.external() == before, "vLLM's own old prompt is gone"
        assert vllm.ask(make_prompt(99 + FLOOD, PROMPT), tokens=1)[0].cached == loadable(PROMPT)

        # Then SGLang writes, and gets its room from vLLM.
        for seed in range(200, 200 + FLOOD // 2):
            sglang.generate(make_prompt(seed, PROMPT), 1)
            sglang.flush()
        assert sglang.generate(make_prompt(199 + FLOOD // 2, PROMPT), 1).storage_tokens == loadable(PROMPT)
        vllm.forget()
        assert same(vllm.ask(prompt), cold)
