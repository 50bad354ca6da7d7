"""Columns of which little is used take little memory, also when their tree grows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from maru_server.columns import ComponentTable, grown


def resident() -> int:
    """Memory of this process, bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_shards_that_few_pages_have_take_little_when_the_tree_grows() -> None:
    table = ComponentTable(1 << 20)
    for shard in range(60):
        table.column(shard)[shard * 1000] = shard + 1
    before = resident()
    table.grow(1 << 21)
    assert resident() - before < 60 << 20, "copied whole they would take 240 MB"
    for shard in range(60):
        assert np.flatnonzero(table.slots[shard]).tolist() == [shard * 1000]
        assert table.slots[shard][shard * 1000] == shard + 1


@pytest.mark.parametrize("dtype", [np.uint32, np.int64, bool])
@pytest.mark.parametrize("used", [0, 1, 15, 16, 17, 1024])
def test_what_is_in_a_column_stays(dtype: type, used: int) -> None:
    rng = np.random.default_rng(used)
    column = np.zeros(1024, dtype)
    column[rng.permutation(1024)[:used]] = 1
    larger = grown(column, 3000)
    assert larger.dtype == column.dtype
    assert (larger[:1024] == column).all()
    assert not larger[1024:].any()
