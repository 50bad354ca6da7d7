"""The checksum of an object: xxh3-64 over its bytes, wherever its fragments lie."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import xxhash


def object_checksum(addresses: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64]) -> int:
    """Checksum of the concatenation of fragments in this process's memory.

    Args:
        addresses, sizes: u64 arrays of shape ``(f,)``: one row of :class:`maru_core.mover.Fragments`.
    Returns:
        1 to 2**64 - 1. Never 0, which stands for "none" in records and messages: an object whose hash is 0 has 1.
    Raises:
        ValueError: shapes differ.
    """
    if addresses.shape != sizes.shape or addresses.ndim != 1:
        raise ValueError(
            f"addresses of shape {addresses.shape}, sizes of shape {sizes.shape}: give one size per address"
        )
    state = xxhash.xxh3_64()
    for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
        state.update((ctypes.c_char * size).from_address(address))
    return state.intdigest() or 1
