"""The checksum of scattered bytes is that of the joined ones, and never 0."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from maru_core.checksum import object_checksum


@given(st.lists(st.binary(min_size=1, max_size=5000), min_size=1, max_size=8))
def test_fragments_are_hashed_in_order(parts: list[bytes]) -> None:
    arrays = [np.frombuffer(part, np.uint8) for part in parts]
    addresses = np.array([array.ctypes.data for array in arrays], np.uint64)
    sizes = np.array([array.nbytes for array in arrays], np.uint64)
    joined = b"".join(parts)
    assert object_checksum(addresses, sizes) == xxhash.xxh3_64_intdigest(joined)
    if b"".join(reversed(parts)) != joined:
        assert object_checksum(addresses[::-1], sizes[::-1]) != object_checksum(addresses, sizes)


def test_zero_means_none_and_is_never_a_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    class HashesToZero:
        def update(self, data: object) -> None: ...

        def intdigest(self) -> int:
            return 0

    monkeypatch.setattr(xxhash, "xxh3_64", HashesToZero)
    assert object_checksum(np.empty(0, np.uint64), np.empty(0, np.uint64)) == 1


def test_shapes_must_agree() -> None:
    for addresses, sizes in (((2,), (1,)), ((1, 1), (1, 1))):
        with pytest.raises(ValueError, match="one size per address"):
            object_checksum(np.ones(addresses, np.uint64), np.ones(sizes, np.uint64))
