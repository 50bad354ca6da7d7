"""The ways to run engines that are compared, and whether this machine has what each needs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import msgspec

from maru_bench.machine import lacking
from maru_bench.stores import EngineStore, FileStore, MaruStore, MooncakeStore, NixlStore, NoStore
from maru_core.errors import ConfigError
from maru_core.pool.uri import parse_size

Engine = Literal["sglang", "vllm"]


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a mode's store may put things, and what it may use."""

    directory: Path
    """Short, for sockets."""
    logs: Path
    python: str
    """The engines' interpreter."""
    pool_size: str
    """Of all that a store may keep."""
    servers: int
    endpoint: str | None = None
    """A Maru server that runs already."""

    @property
    def pool_bytes(self) -> int:
        return parse_size(self.pool_size)


def _maru(place: Place) -> EngineStore:
    return MaruStore(place.directory, size=place.pool_size, log=place.logs / "maru-server.log", endpoint=place.endpoint)


def _mooncake(place: Place) -> EngineStore:
    segment = place.pool_bytes // place.servers
    return MooncakeStore(place.python, segment_bytes=segment, log=place.logs / "mooncake_master.log")


class Mode(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    says: str
    """What it is, for the report."""
    make: Callable[[Place], EngineStore]
    engines: tuple[Engine, ...] = ("sglang",)
    needs: str | None = None
    """Module that must be there in the engines' environment."""
    cure: str = ""
    hierarchical: bool = True
    """SGLang's ``--enable-hierarchical-cache``."""
    linker: bool = False
    """SGLang's direct linker instead: no host tier."""
    storage_is_host: bool = False
    """What comes from the store is reported as ``host`` (SGLang's linkers)."""

    def sglang_arguments(self, store: EngineStore) -> tuple[str, ...]:
        """Words of SGLang's command line beside those for hierarchical caches."""
        if not self.linker:
            return ()
        return (
            "--enable-unified-cache-external-linker",
            "--unified-cache-external-linker-backend",
            "maru",
            "--unified-cache-external-linker-config",
            json.dumps(store.extra_config),
        )

    def vllm_transfer(self, store: EngineStore) -> dict[str, object] | None:
        """vLLM's ``--kv-transfer-config``."""
        if not isinstance(store, MaruStore):
            return None
        return {
            "kv_connector": "MaruConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": store.extra_config,
        }


def _none(place: Place) -> EngineStore:
    return NoStore()


MODES: Final = {
    mode.name: mode
    for mode in (
        Mode(
            name="none",
            says="each engine with its own device cache alone",
            make=_none,
            engines=("sglang", "vllm"),
            hierarchical=False,
        ),
        Mode(name="hicache", says="SGLang's hierarchical cache: device and host memory, no storage", make=_none),
        Mode(
            name="file",
            says="SGLang's file backend under its hierarchical cache: one file per page",
            make=lambda place: FileStore(place.directory),
        ),
        Mode(
            name="maru",
            says="Maru: SGLang's HiCache backend, or vLLM's connector",
            make=_maru,
            engines=("sglang", "vllm"),
            needs="maru_core.store",
            cure="install Maru there",
        ),
        Mode(
            name="maru-direct",
            says="Maru as SGLang's direct linker: between device pages and the pool, no host tier",
            make=_maru,
            needs="maru_sglang.radix.linker",
            cure="install a Maru that has it there",
            hierarchical=False,
            linker=True,
            storage_is_host=True,
        ),
        Mode(
            name="mooncake",
            says="Mooncake Store over TCP, under SGLang's hierarchical cache",
            make=_mooncake,
            needs="mooncake.store",
            cure="pip install mooncake-transfer-engine-non-cuda there, and apt-get install libibverbs1",
        ),
        Mode(
            name="nixl",
            says="NIXL's POSIX plugin under SGLang's hierarchical cache: one file per page",
            make=lambda place: NixlStore(place.directory),
            needs="nixl._api",
            cure="pip install --no-deps nixl==1.5.1 nixl-cu13==1.5.1 there",
        ),
    )
}


def choose_modes(names: list[str], engine: Engine, python: str) -> tuple[list[Mode], dict[str, str]]:
    """The modes that can run here, and for each of the others why it cannot.

    Raises:
        ConfigError: a name that no mode has, or nothing is left to run.
    """
    unknown = [name for name in names if name not in MODES]
    if unknown:
        raise ConfigError(f"--modes has {unknown[0]!r}: give some of {', '.join(MODES)}, comma-separated")
    chosen, skipped = [], {}
    missing = lacking(python, sorted({MODES[name].needs or "" for name in names} - {""}))
    for name in dict.fromkeys(names):
        mode = MODES[name]
        if engine not in mode.engines:
            skipped[name] = f"{name} is no mode of {engine}"
        elif mode.needs in missing:
            skipped[name] = f"{python} cannot import {mode.needs} ({missing[mode.needs]}): {mode.cure}"
        else:
            chosen.append(mode)
    if not chosen:
        raise ConfigError(f"no mode can run: {'; '.join(skipped.values())}")
    return chosen, skipped
