"""Pools: where they are (:mod:`uri`), how they are cut (:mod:`geometry`), how they are mapped (:mod:`memory`),
and how a reader validates what it copied out of one (:mod:`view`). The bytes themselves are in :mod:`format`."""

from maru_core.pool.geometry import Geometry
from maru_core.pool.memory import PoolMemory
from maru_core.pool.uri import PoolURI, format_size, parse_pool_uri, parse_size
from maru_core.pool.view import PoolView

__all__ = ["Geometry", "PoolMemory", "PoolURI", "PoolView", "format_size", "parse_pool_uri", "parse_size"]
