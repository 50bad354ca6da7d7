"""``maru-bench metadata --clients``: its arithmetic, what it takes for CPU time, and a small real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from maru_bench.clients import ClientsResult, PhaseRow, chains_of, cpu_s, median_row
from maru_bench.echo import EchoServer
from maru_bench.servers import MaruServer


def row(phase: str, cpu_us: float, p99_us: float = 900.0) -> PhaseRow:
    return PhaseRow(phase=phase, calls_per_s=1e4, p50_us=100.0, p99_us=p99_us, cpu_us=cpu_us)


def result(match_us: float, pages: int = 128) -> ClientsResult:
    rows = [row("echo", 20.0), row("match", match_us), row("match+writer", 1e3)]
    return ClientsResult(machine={}, clients=4, pages=pages, repeats=1, seconds=1.0, rows=rows)


def test_the_target_is_of_matches_without_a_writer() -> None:
    assert result(100.0).targets_met
    assert not result(100.1).targets_met
    assert result(500.0, pages=512).targets_met  # other numbers of pages have no target


def test_each_figure_has_its_own_median() -> None:
    rows = [row("match", 10.0, p99_us=3.0), row("match", 30.0, p99_us=1.0), row("match", 20.0, p99_us=2.0)]
    assert (median_row(rows).cpu_us, median_row(rows).p99_us) == (20.0, 2.0)


def test_cpu_time_counts_work_and_not_waiting() -> None:
    before = cpu_s(os.getpid())
    time.sleep(0.2)
    waited = cpu_s(os.getpid()) - before
    own = time.process_time()
    while time.process_time() - own < 0.2:
        pass
    worked = cpu_s(os.getpid()) - before - waited
    assert worked >= 0.15
    assert waited < worked


def test_all_clients_know_the_same_chains() -> None:
    assert chains_of(7, 3) == chains_of(7, 3)
    assert chains_of(7, 3) != chains_of(8, 3)
    assert len(set(chains_of(7, 3))) == len(chains_of(7, 3))


def test_a_small_run(tmp_path: Path) -> None:
    out = tmp_path / "clients.json"
    argv = ["metadata", "--clients", "2", "--repeats", "1", "--seconds", "0.3", "--resident", "256", "--json", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "maru_bench", *argv], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert [figure["phase"] for figure in figures["rows"]] == ["echo", "match", "match+writer"]
    assert all(figure["calls_per_s"] > 0 and figure["cpu_us"] > 0 for figure in figures["rows"])
    assert [figure["writes_per_s"] > 0 for figure in figures["rows"]] == [False, False, True]
    assert "CPU <= 100" in done.stdout


def test_readers_that_find_less_than_was_stored_end_the_run(tmp_path: Path) -> None:
    """The driver itself: a client whose chains are not in the server."""
    with MaruServer(tmp_path, size="64M") as server, EchoServer(tmp_path) as echo:
        arguments = [server.endpoint, echo.endpoint, f"ipc://{tmp_path}/control.sock", "1", "8", "0"]
        with zmq.Context() as context, context.socket(zmq.ROUTER) as control:
            control.linger = 0
            control.bind(arguments[2])
            client = subprocess.Popen(
                [sys.executable, "-m", "maru_bench.clients", *arguments], stderr=subprocess.PIPE, text=True
            )
            assert control.poll(60_000), "the client did not report"
            number, _ = control.recv_multipart()
            control.send_multipart([number, msgspec.msgpack.encode(["match", 0.2])])
            _, stderr = client.communicate(timeout=180)
            assert client.returncode != 0
            assert "were not found by client 0" in stderr


@pytest.mark.parametrize("clients", ["-1", "65"])
def test_a_number_of_clients_that_makes_no_sense_is_refused(clients: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "maru_bench", "metadata", "--clients", clients],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 2
    assert "Invalid value for '--clients'" in " ".join(done.stderr.replace("│", "").split())
