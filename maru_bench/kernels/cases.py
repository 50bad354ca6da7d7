"""What ``maru-bench kernels`` moves: an engine's paged KV of one model and page size, slots of a real pool, and what must be where.

Every movement can be checked whole: after a store the pool's bytes are known to the last one, whether they were to change
or not, and after a load the engine's are. Needs torch; the command imports it only when it runs.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from maru_bench.kernels.models import Model
from maru_core.errors import ConfigError
from maru_core.pool.format import SLOT_GRAIN
from maru_core.pool.memory import PoolMemory
from maru_sglang.kernels.layout import Layout, Pages

U64 = npt.NDArray[np.uint64]

#: What memory that nothing may have written is full of, in the pool and (as a mask) in the engine.
_UNTOUCHED: Final = 0xA5


def slot_bytes(nbytes: int) -> int:
    """Of a slot for objects of ``nbytes``."""
    return -(-nbytes // SLOT_GRAIN) * SLOT_GRAIN


class Case:
    """Some pages of a model, scattered at random in an engine's buffers, and a slot of the pool for each.

    Args:
        pages: how many move; the engine has twice as many.
        device: where the engine's buffers are.
    Raises:
        ConfigError: they do not fit in the pool.
    """

    def __init__(
        self, model: Model, page_tokens: int, pages: int, memory: PoolMemory, device: torch.device, seed: int
    ) -> None:
        self.model = model
        self.page_tokens = page_tokens
        self.memory = memory
        self.device = device
        self.nbytes = model.token_bytes * page_tokens
        self.fragment_bytes = model.row_bytes * page_tokens
        random = np.random.default_rng(seed)
        generator = torch.Generator(device).manual_seed(seed)
        rows = 2 * pages * page_tokens
        self.buffers = [
            torch.randint(0, 256, (rows, model.row_bytes), dtype=torch.uint8, device=device, generator=generator)
            for _ in range(model.layers * model.buffers)
        ]
        self.original = [buffer.clone() for buffer in self.buffers]
        if model.buffers == 2:
            self.layout = Layout.mha(self.buffers[: model.layers], self.buffers[model.layers :], page_tokens)
        else:
            self.layout = Layout.mla(self.buffers, page_tokens)
        if self.layout.nbytes != self.nbytes:
            raise AssertionError(f"{self.layout.nbytes} bytes of a layout, {self.nbytes} of its model")
        self.page_ids = random.permutation(2 * pages)[:pages]
        self.offsets = self._slots(pages, random)

    def _slots(self, pages: int, random: np.random.Generator) -> U64:
        """Slots as a server would cut them, drawn from the whole pool."""
        geometry = self.memory.geometry
        size = slot_bytes(self.nbytes)
        per_extent = geometry.extent_bytes // size
        count = per_extent * geometry.extent_count
        if pages > count:
            raise ConfigError(
                f"{pages} pages of {self.nbytes} bytes do not fit in a pool of {geometry.extent_count} extents of "
                f"{geometry.extent_bytes} bytes: give a smaller --bytes"
            )
        chosen = random.permutation(count)[:pages].astype(np.uint64)
        extent, index = chosen // np.uint64(per_extent), chosen % np.uint64(per_extent)
        return np.uint64(geometry.off_data) + extent * np.uint64(geometry.extent_bytes) + index * np.uint64(size)

    def pages(self, count: int | None = None) -> Pages:
        """The first ``count`` of the pages that move; None: all."""
        return self.layout.pages(self.page_ids[:count] * self.page_tokens)

    # ------------------------------------------------------------ checking

    def spoil_pool(self) -> None:
        self.memory.data[:] = _UNTOUCHED

    def spoil_engine(self) -> None:
        for buffer, original in zip(self.buffers, self.original, strict=True):
            torch.bitwise_xor(original, _UNTOUCHED, out=buffer)

    def restore_engine(self) -> None:
        for buffer, original in zip(self.buffers, self.original, strict=True):
            buffer.copy_(original)

    def expected(self, count: int) -> npt.NDArray[np.uint8]:
        """The bytes of the first ``count`` objects, shape ``(count, nbytes)``; K of all layers, then V."""
        ids = torch.from_numpy(self.page_ids[:count]).to(self.device)
        parts = [original.view(-1, self.fragment_bytes)[ids].cpu() for original in self.original]
        objects: npt.NDArray[np.uint8] = torch.cat(parts, dim=1).numpy()
        return objects

    def pool_holds(self, count: int) -> str:
        """Empty, or what is wrong with the pool after the first ``count`` objects were stored into a spoiled one."""
        image = np.full(len(self.memory.data), _UNTOUCHED, np.uint8)
        starts = (self.offsets[:count] - np.uint64(self.memory.geometry.off_data)).tolist()
        for start, content in zip(starts, self.expected(count), strict=True):
            image[start : start + self.nbytes] = content
        return _difference(image, self.memory.data, "of the pool")

    def engine_holds(self, count: int) -> str:
        """The same for the engine's buffers, after the first ``count`` objects were loaded into a spoiled one."""
        ids = torch.from_numpy(self.page_ids[:count]).to(self.device)
        for index, (buffer, original) in enumerate(zip(self.buffers, self.original, strict=True)):
            image = original ^ _UNTOUCHED
            image.view(-1, self.fragment_bytes)[ids] = original.view(-1, self.fragment_bytes)[ids]
            if not torch.equal(buffer, image):
                return _difference(
                    image.cpu().numpy().reshape(-1), buffer.cpu().numpy().reshape(-1), f"of the engine's buffer {index}"
                )
        return ""


def _difference(expected: npt.NDArray[np.uint8], found: npt.NDArray[np.uint8], where: str) -> str:
    if np.array_equal(expected, found):
        return ""
    wrong = np.flatnonzero(expected != found)
    first = int(wrong[0])
    return f"{len(wrong)} bytes {where} are wrong, the first at {first}: {found[first]} instead of {expected[first]}"
