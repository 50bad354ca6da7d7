"""What an operator sees of a server with several pools: status, sessions, doctor, metrics and the page."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from operating import asked, asked_json, maru

from maru_core.store import Store, StoreConfig
from support import ServerProcess, await_condition, namespace, running_server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pools")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    options = ("--pool", f"file://{folder}/b", "--http", "127.0.0.1:0")
    with running_server(folder, *options, pool=f"file://{folder}/a") as running:
        yield running


@pytest.fixture(scope="module")
def stores(server: ServerProcess, folder: Path) -> Iterator[list[Store]]:
    made = [
        Store.open(StoreConfig(server=server.endpoint, timeout_ms=60_000, pool=pool), namespace(), name=f"engine {at}")
        for at, pool in enumerate([None, f"file://{folder}/a"])
    ]
    yield made
    for store in made:
        store.close()


def test_status_has_a_line_for_each_pool_and_why(server: ServerProcess, stores: list[Store], folder: Path) -> None:
    text = " ".join(asked("status", server=server, environ={"COLUMNS": "400"}).split())
    assert f"pool 0 file://{folder}/a" in text
    assert f"pool 1 file://{folder}/b" in text
    assert "2 by cxl (clients)" in text
    assert "1 by cxl, 1 not at all (clients)" in text
    assert "engine 1 on" in text
    assert "none, " in text
    found = asked_json("status", server=server)
    assert [row["clients"]["none"] for row in found["pools"]] == [0, 1]
    assert {row["name"] for row in found["reaches"]} == {"engine 0", "engine 1"}


def test_sessions_say_how_each_reaches_them(server: ServerProcess, stores: list[Store]) -> None:
    text = asked("sessions", server=server, environ={"COLUMNS": "300"})
    assert "cxl cxl" in text
    assert "cxl none" in text


def test_doctor_looks_at_every_pool(server: ServerProcess, stores: list[Store], folder: Path) -> None:
    found = json.loads(maru("doctor", "--json", server=server).stdout)
    texts = [finding["text"] for finding in found["findings"] if finding["name"] == "pool"]
    assert len(texts) == 2
    assert [f"{folder}/{name}" in text for name, text in zip("ab", texts, strict=True)] == [True, True]


def test_metrics_and_the_page_have_each_pool(server: ServerProcess, stores: list[Store]) -> None:
    def metrics() -> str:
        with urllib.request.urlopen(f"{server.ready['http']}/metrics", timeout=60) as reply:
            text: str = reply.read().decode()
        return text

    await_condition(lambda: 'maru_pool_clients{pool="1",way="none"} 1.0' in metrics(), "what is shown is new", 60)
    assert 'maru_pool_part_bytes{pool="1"}' in metrics()
    with urllib.request.urlopen(f"{server.ready['http']}/api/status.json", timeout=60) as reply:
        status = json.load(reply)
    assert len(status["pools"]) == 2
    with urllib.request.urlopen(f"{server.ready['http']}/api/tree.json", timeout=60) as reply:
        assert isinstance(json.load(reply)["rows"], list)
