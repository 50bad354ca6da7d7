"""Stores in processes of their own, on hosts of their own (:mod:`hosts`): told what to do, they say what came of it."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from forked import enter, forkserver
from maru_core.protocol import HASH_BYTES, ROOT
from maru_core.store import Store, StoreConfig
from support import Pages, hashes, namespace


class FarStore:
    """A store on a host. One call at a time: :meth:`begin` and :meth:`result`, or :meth:`ask` for both."""

    def __init__(
        self, name: str, host: int | None, config: StoreConfig, log: Path, environ: dict[str, str], **fields: object
    ) -> None:
        """
        Args:
            host: process in whose network it runs.
            environ: variables besides ours.
            fields: of its namespace.
        """
        self.name = name
        self.log = log
        self._pipe, theirs = forkserver.Pipe()
        self._process = forkserver.Process(
            target=_serve,
            args=(theirs, name, host, msgspec.to_builtins(config), str(log), dict(os.environ) | environ, fields),
            daemon=True,
        )
        self._process.start()
        theirs.close()

    def begin(self, method: str, *arguments: Any) -> None:
        self._pipe.send((method, arguments))

    def result(self, timeout_s: float = 180.0) -> Any:
        assert self._pipe.poll(timeout_s), f"{self.name} said nothing for {timeout_s:g} s: {self.log.read_text()}"
        result = self._pipe.recv()
        if isinstance(result, Exception):
            raise result
        return result

    def ended(self) -> bool:
        """Whether the call that was begun has its result."""
        return self._pipe.poll(0)

    def ask(self, method: str, *arguments: Any) -> Any:
        self.begin(method, *arguments)
        return self.result()

    # ------------------------------------------------------------ what it can do

    def put(self, seed: int, count: int, sizes: Sequence[int]) -> np.ndarray:
        """Store chain ``seed``, of pages that follow from it too; which are stored."""
        return np.asarray(self.ask("put", seed, count, sizes))

    def get(self, seed: int, count: int, sizes: Sequence[int]) -> np.ndarray:
        """Load what :meth:`put` stores; which pages were loaded. Fails where one was not as stored."""
        return self.loaded(self.ask("get", seed, count, sizes))

    def loaded(self, result: tuple[list[bool], list[bool]]) -> np.ndarray:
        """What :meth:`get` says of the result of a ``get`` that was begun."""
        loaded, same = (np.asarray(each) for each in result)
        assert same[loaded].all(), f"{self.name}: wrong bytes in pages {np.flatnonzero(loaded & ~same)}"
        return loaded

    def prefix(self, seed: int, count: int) -> int:
        return int(self.ask("prefix", seed, count))

    def close(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._pipe.send(("close", ()))
        self._process.join(20)
        self._process.kill()
        self._process.join()
        self._pipe.close()


class _Serving:
    """What the process does."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last: tuple[Pages, list[bytes]] | None = None

    def put(self, seed: int, count: int, sizes: tuple[int, ...]) -> list[bool]:
        pages = Pages(count, sizes, seed=seed)
        return self._store.put("kv", 0, 1, ROOT, hashes(count, seed=seed), pages.fragments).tolist()

    def get(self, seed: int, count: int, sizes: tuple[int, ...]) -> tuple[list[bool], list[bool]]:
        pages, right = Pages(count, sizes), Pages(count, sizes, seed=seed)
        for part in pages.data:
            self._store.register(part.ctypes.data, part.nbytes)
        loaded = self._store.get("kv", 0, hashes(count, seed=seed), pages.fragments)
        self._last = pages, [part.tobytes() for part in pages.data]
        return loaded.tolist(), pages.same(right).tolist()

    def changed(self) -> bool:
        """Whether anything has landed where the last get loaded to since that returned."""
        assert self._last is not None
        pages, before = self._last
        return [part.tobytes() for part in pages.data] != before

    def prefix(self, seed: int, count: int) -> int:
        chain = hashes(count, seed=seed)
        assert len(chain) == count * HASH_BYTES
        return self._store.prefix(["kv"], 0, chain)

    def clear(self) -> bool:
        return self._store.clear()

    def stats(self) -> dict[str, float | int | str]:
        return self._store.stats()

    def mapped(self) -> bool:
        """Whether the pool's memory is on this host."""
        return self._store._lives.current().reach.memory is not None

    def agents(self) -> list[str]:
        return [agent.name for agent in self._store._session.agents().agents]

    def close(self) -> None:
        self._store.close()


def _serve(
    pipe: Connection,
    name: str,
    host: int | None,
    config: dict[str, Any],
    log: str,
    environ: dict[str, str],
    fields: dict[str, Any],
) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with the tests: PR_SET_PDEATHSIG
    os.environ.update(environ)
    if host is not None:
        enter(host)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", force=True)
    serving = _Serving(Store.open(msgspec.convert(config, StoreConfig), namespace(**fields), name=name))
    method = ""
    while method != "close":
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(serving, method)(*arguments))
        except Exception as error:
            pipe.send(error)
