"""The examples of ``examples/``, as they stand, with real engines; all but the first by hand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import has_gpu

pytestmark = [pytest.mark.sglang, pytest.mark.server, pytest.mark.timeout(420)]

ROOT = Path(__file__).parents[2]
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
#: What the script says of a server of SGLang's, and of one of vLLM's: tokens computed, from a cache, and from Maru or host memory.
_SGLANG = r"600 tokens, (\d+) computed, (\d+) from a cache \((\d+) from Maru"
_VLLM = r"vllm=\S+ 600 tokens, (\d+) computed, (\d+) from a cache"


def run(script: str, **variables: str) -> str:
    """What the script printed; it ended well and left nothing behind."""
    environment = {**os.environ, "SGLANG_PYTHON": sys.executable, "DEVICE": "cuda" if has_gpu() else "cpu", **variables}
    environment.pop("MARU_SERVER", None)
    before = set(Path("/dev/shm").glob("maru-example-*"))
    done = subprocess.run(
        [str(ROOT / "examples" / script)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the answers are alike" in done.stdout
    assert set(Path("/dev/shm").glob("maru-example-*")) <= before
    return done.stdout


def test_two_sglang_servers(model: Path) -> None:
    told = run("two_sglang_servers.sh", MODEL=str(model))
    # Whole pages of 16 tokens; at least one token is always computed.
    assert re.findall(_SGLANG, told) == [("600", "0", "0"), ("8", "592", "592")]
    # The prompt has 37 whole pages; its answer fills one more.
    assert re.search(r"pages\W+3[78]\b", told), told


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_servers_that_reach_the_pool_through_an_agent(model: Path) -> None:
    pytest.importorskip("nixl", reason="no NIXL in this environment: docs/rdma.md says how to get it")
    told = run("rdma_node.sh", MODEL=str(model))
    assert re.findall(_SGLANG, told) == [("600", "0", "0"), ("8", "592", "592")]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not VLLM.exists(), reason="no vLLM: make vllm-env")
def test_sglang_and_vllm() -> None:
    told = run("sglang_and_vllm.sh", VLLM_PYTHON=str(VLLM))
    assert re.findall(_SGLANG, told) == [("600", "0", "0")]
    assert re.findall(_VLLM, told) == [("600", "0")]
    assert told.partition("in which fields they differ")[2].strip()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not VLLM.exists(), reason="no vLLM: make vllm-env")
def test_prefill_and_decode() -> None:
    told = run("prefill_and_decode.sh", VLLM_PYTHON=str(VLLM))
    [(computed, cached)] = re.findall(_VLLM, told)
    # Blocks of vLLM's CPU attention have 32 tokens or more; all but the last ones come from the other server.
    assert int(cached) >= 512
    assert int(computed) + int(cached) == 600
