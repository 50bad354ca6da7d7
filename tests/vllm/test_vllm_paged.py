"""KV on a GPU: the same worker with the mover for it, between real stores, byte for byte. Where there is no GPU its kernels run in
Triton's interpreter, on the CPU's memory."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import paged_cases
import pytest

from support import ServerProcess, running_server

torch = pytest.importorskip("torch")
pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.base")
pytestmark = pytest.mark.vllm

#: Where the script that makes the environment puts Triton: out of the way of a vLLM that has none for its CPU.
APART = Path(sys.prefix) / "maru-triton"
ORDERS = [*paged_cases.ORDERS, "states"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("server"), size="64M") as server:
        yield server


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Runs a function in a process whose Triton interprets kernels."""
    if importlib.util.find_spec("triton") is None and not APART.exists():
        pytest.skip(f"Triton is not installed here, nor in {APART}: tools/vllm_env.sh")
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        pool.submit(os.getpid).result()  # started with the environment of this moment
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    with pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_cross_between_the_movers(interpreted: Callable[..., Any], server: ServerProcess, order: str) -> None:
    seed = 10 * (1 + ORDERS.index(order))
    more = str(APART) if APART.exists() else ""
    assert interpreted(paged_cases.crosses, server.endpoint, order, seed, "cpu", "kernel", more) == ""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that this torch can use")
@pytest.mark.parametrize("how", ["kernel", "dma", None])
def test_blocks_cross_between_a_gpu_and_the_cpu(server: ServerProcess, how: str | None) -> None:
    for number, order in enumerate(ORDERS):
        seed = 1000 + 200 * ["kernel", "dma", None].index(how) + 10 * number
        assert (order, paged_cases.crosses(server.endpoint, order, seed, "cuda", how)) == (order, "")


def test_where_kv_lies_decides_the_mover(server: ServerProcess) -> None:
    from maru_core.mover import Fragments
    from maru_sglang.kernels.layout import Pages
    from maru_vllm.device import already, moments_of, mover_of
    from maru_vllm.layout import GroupLayout

    caches = paged_cases.make_caches("BLHNC", "cpu", 1)
    plain = GroupLayout(list(caches), caches, paged_cases.BLOCKS)
    assert (plain.device.type, type(plain.buffers([1, 2]))) == ("cpu", Fragments)
    assert mover_of(plain.device, None) is None
    assert moments_of(plain.device) is already
    paged = GroupLayout(list(caches), caches, paged_cases.BLOCKS, paged=True)
    assert isinstance(paged.buffers([1, 2]), Pages)
    assert paged.buffers([1, 2]).nbytes == paged.object_bytes == plain.object_bytes
    assert mover_of(torch.device("cuda:0"), 2) is not None
    with pytest.raises(ValueError, match="of a KV cache of 12"):
        paged.buffers([12])
