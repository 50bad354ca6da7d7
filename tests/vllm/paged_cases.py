"""A worker whose mover is the one for GPUs, beside one with the CPU's, on a real server: run where Triton interprets, or on a GPU."""

from __future__ import annotations

import sys
from typing import Any

BLOCKS, HEADS, TOKENS, WIDTH, LAYERS = 12, 2, 8, 24, 3
#: Orders of memory, by name: a tensor for each layer, or (with L) one for all; vLLM's HND is BHNC, its NHD is BNHC.
ORDERS = ("BHNC", "BNHC", "HBNC", "LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC", "BNLHC", "LHBNC")
TAKEN, GIVEN, BACK = [3, 7, 4, 10], [9, 0, 1, 5], [2, 11, 6, 8]


def make_caches(order: str, device: str, seed: int) -> dict[str, Any]:
    """Views ``[blocks, heads, tokens, width]`` of each layer, of random bytes that mean nothing."""
    import torch

    sizes = {"B": BLOCKS, "H": HEADS, "N": TOKENS, "C": WIDTH, "L": LAYERS}
    generator = torch.Generator().manual_seed(seed)

    def memory() -> Any:
        shape = [sizes[name] for name in order]
        return torch.randint(-30000, 30000, shape, dtype=torch.int16, generator=generator).to(device)

    rest = order.replace("L", "")
    axes = [rest.index(name) for name in "BHNC"]
    if rest == order:
        return {f"l{layer}": memory().permute(axes) for layer in range(LAYERS)}
    whole = memory()
    return {f"l{layer}": whole.select(order.index("L"), layer).permute(axes) for layer in range(LAYERS)}


def make_states(device: str, seed: int) -> dict[str, Any]:
    """Two tensors a layer, as of a model with states, in a type that is wider than the KV's."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    shapes = ((BLOCKS, 5, 7), (BLOCKS, 3))
    return {
        f"l{layer}": [torch.randn(shape, generator=generator).to(device) for shape in shapes] for layer in range(LAYERS)
    }


class Side:
    """A worker on ``caches``."""

    def __init__(self, endpoint: str, caches: dict[str, Any], *, how: str | None, paged: bool) -> None:
        from maru_core.store import Store
        from maru_core.store_config import StoreConfig
        from maru_sglang.kernels.mover import PagedMover
        from maru_vllm.device import moments_of
        from maru_vllm.groups import Placement
        from maru_vllm.layout import GroupLayout
        from maru_vllm.worker import WorkerSide
        from support import namespace

        self.caches = caches
        layout = GroupLayout(list(caches), caches, BLOCKS, paged=paged)
        config = StoreConfig(server=endpoint, timeout_ms=30_000)
        self.store = Store.open(
            config,
            namespace(),
            name="test",
            mover=(lambda memory: PagedMover(memory, layout.device, how=how)) if paged else None,  # type: ignore[arg-type]
        )
        placement = Placement(stage=0, stages=1, shard=0, world=1, writer=True)
        self.worker = WorkerSide(self.store, [layout], ["kv"], placement, moments_of(layout.device))
        self._step = 0

    def run(self, **parts: Any) -> None:
        from maru_vllm.metadata import MaruMetadata

        self._step += 1
        metadata = MaruMetadata(step=self._step, **parts)
        self.worker.begin(metadata)
        self.worker.save(metadata)

    def put(self, pages: bytes, blocks: list[int]) -> None:
        from maru_core.protocol import ROOT
        from maru_vllm.metadata import PageRun, Transfer
        from support import await_condition

        self.run(stores=[Transfer("r", [PageRun(0, ROOT, pages, blocks)])])
        await_condition(lambda: bool(self.store.present("kv", 0, pages).all()), "nothing is stored")

    def get(self, pages: bytes, blocks: list[int]) -> Any:
        """What is reported of the load."""
        from maru_core.protocol import ROOT
        from maru_vllm.metadata import PageRun, Transfer
        from support import await_condition

        done: list[Any] = []
        self.run(loads=[Transfer("q", [PageRun(0, ROOT, pages, blocks)])])
        await_condition(
            lambda: done.append(self.worker.take_done(idle=True)) or "q" in done[-1].received, "nothing is received"
        )
        return done[-1]

    def blocks(self, numbers: list[int]) -> list[Any]:
        """A copy of the bytes of some blocks, a tensor for each cache."""
        found = []
        for value in self.caches.values():
            found += [tensor[numbers].cpu().clone() for tensor in (value if isinstance(value, list) else [value])]
        return found


def crosses(
    endpoint: str, order: str, seed: int, device: str = "cpu", how: str | None = "kernel", more: str = ""
) -> str:
    """Blocks go from a worker with the GPU's mover to one with the CPU's, and back into other blocks.

    Args:
        order: one of :data:`ORDERS`, or ``states``.
        more: a folder with packages that the environment has not (Triton).
    Returns:
        What went wrong, or nothing.
    """
    if more:
        sys.path.append(more)
    import torch

    from support import hashes

    def make(where: str, seed: int) -> dict[str, Any]:
        return make_states(where, seed) if order == "states" else make_caches(order, where, seed)

    one = Side(endpoint, make(device, seed), how=how, paged=True)
    two = Side(endpoint, make("cpu", seed + 1), how=None, paged=False)

    def equal(a: list[Any], b: list[Any]) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    try:
        first, second = hashes(len(TAKEN), seed), hashes(len(TAKEN), seed + 1)
        others = [block for block in range(BLOCKS) if block not in GIVEN]
        before = two.blocks(others)
        one.put(first, TAKEN)
        if (done := two.get(first, GIVEN)).failed:
            return f"the CPU's worker could not load {done}"
        if not equal(two.blocks(GIVEN), one.blocks(TAKEN)):
            return "what the GPU's mover stored is not what the CPU's loads"
        if not equal(two.blocks(others), before):
            return "the CPU's load changed other blocks"
        two.put(second, TAKEN)
        others = [block for block in range(BLOCKS) if block not in BACK]
        before = one.blocks(others)
        if (done := one.get(second + first[:32], [*BACK[:-1], BACK[-1], 0])).failed:
            return f"the GPU's worker could not load {done}"
        if not equal(one.blocks(BACK), two.blocks(TAKEN)) or not equal(one.blocks([0]), two.blocks(GIVEN[:1])):
            return "what the GPU's mover loaded is not what the CPU's stored"
        changed = [index for index, block in enumerate(others) if block != 0]
        if not equal([each[changed] for each in one.blocks(others)], [each[changed] for each in before]):
            return "the GPU's load changed other blocks"
        # A page that is not there is reported, block by block, and the others are loaded.
        done = one.get(first[:64] + hashes(1, seed + 2), [5, 6, 1])
        if (done.failed, done.bad_blocks) != ({"q"}, {1}) or not equal(one.blocks([5, 6]), two.blocks(GIVEN[:2])):
            return f"of two pages and a missing one: {done}"
        return ""
    finally:
        one.worker.close()
        two.worker.close()
