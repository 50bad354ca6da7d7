"""``maru-bench metadata``: its arithmetic, its yardstick, and a small real run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from maru_bench import metadata
from maru_bench.echo import EchoClient, EchoServer
from maru_bench.metadata import MetadataResult, MetadataRow, make_rows

SIZES = {"match": (4000, 4600), "reserve": (4100, 2700), "commit": (1600, 150)}
ECHO = {"match": [1e-4] * 3, "reserve": [1e-4] * 3, "commit": [0.5e-4] * 3}


def rows(match: float, reserve: float, commit: float, pages: int = 128) -> dict[str, MetadataRow]:
    """Rows for those medians, in seconds."""
    seconds = {
        name: [median / 3, median, median * 9]
        for name, median in {"match": match, "reserve": reserve, "commit": commit}.items()
    }
    return {row.operation: row for row in make_rows(pages, seconds, ECHO, SIZES)}


def test_an_operation_is_told_in_echoes_of_its_own_bytes() -> None:
    found = rows(1.5e-4, 2e-4, 1e-4)
    assert found["match"].maru_us == pytest.approx(150)
    assert found["match"].echo_us == pytest.approx(100)
    assert found["match"].echoes == pytest.approx(1.5)
    assert found["reserve"].echoes == pytest.approx(2.0)
    assert found["commit"].echoes == pytest.approx(2.0)
    assert (found["commit"].request_bytes, found["commit"].reply_bytes) == (1600, 150)


def test_reserve_and_commit_together_are_the_sum_of_their_echoes() -> None:
    both = rows(1e-4, 2e-4, 1e-4)["reserve+commit"]
    assert both.echoes == pytest.approx(4.0)
    assert both.maru_us == pytest.approx(300)
    assert both.request_bytes == 5700


@pytest.mark.parametrize(
    ("match", "reserve", "commit", "met"),
    [
        (2.0e-4, 2e-4, 1.2e-4, (True, True)),
        (2.1e-4, 2e-4, 1.2e-4, (False, True)),
        (1.9e-4, 2e-4, 1.3e-4, (True, False)),
    ],
)
def test_targets_of_128_pages(match: float, reserve: float, commit: float, met: tuple[bool, bool]) -> None:
    found = rows(match, reserve, commit)
    assert (found["match"].met, found["reserve+commit"].met) == met
    assert found["reserve"].met is None
    assert result(list(found.values())).targets_met == all(met)


def test_other_numbers_of_pages_have_no_target() -> None:
    assert all(row.target is None and row.met is None for row in rows(1.0, 1.0, 1.0, pages=512).values())


def result(rows: list[MetadataRow], validation_met: bool = True) -> MetadataResult:
    return MetadataResult(
        machine={}, repeats=3, resident_pages=0, rows=rows, validation_pages=128, validation_us=1.0,
        validation_target_us=15.0, validation_met=validation_met, start_new_s=0.1, start_rebuild_s=0.1,
    )  # fmt: skip


def test_a_slow_validation_is_a_target_not_met() -> None:
    good = list(rows(1e-4, 1e-4, 1e-4).values())
    assert result(good).targets_met
    assert not result(good, validation_met=False).targets_met


def test_the_echo_answers_with_the_asked_number_of_bytes(tmp_path: Path) -> None:
    with EchoServer(tmp_path) as server, EchoClient(server.endpoint) as echo:
        for nbytes, reply_bytes in ((8, 0), (4000, 4600), (100, 1), (4000, 12)):
            request = EchoClient.request(nbytes, reply_bytes)
            assert len(request) == nbytes
            assert len(echo.exchange(request)) == reply_bytes


def test_a_small_real_run_writes_every_row(tmp_path: Path) -> None:
    file = tmp_path / "metadata.json"
    command = [
        sys.executable,
        "-m",
        "maru_bench",
        "metadata",
        "--pages",
        "1,128",
        "--repeats",
        "3",
        "--resident",
        "600",
    ]
    process = subprocess.Popen([*command, "--json", str(file)], stderr=subprocess.PIPE, text=True)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    data = json.loads(file.read_text())
    operations = ("match", "reserve", "commit", "reserve+commit")
    assert [(row["operation"], row["pages"]) for row in data["rows"]] == [
        (operation, pages) for pages in (1, 128) for operation in operations
    ]
    for row in data["rows"]:
        assert row["maru_us"] > 0
        assert row["echo_us"] > 0
        targeted = row["pages"] == 128 and row["operation"] in ("match", "reserve+commit")
        assert (row["target"] is not None) == targeted
        # What travels holds at least the hashes out, or the slots and generations back and out again.
        if row["operation"] in ("match", "reserve"):
            assert row["request_bytes"] > 32 * row["pages"]
    assert data["validation_us"] > 0
    assert data["start_new_s"] > 0
    assert data["start_rebuild_s"] > 0
    assert data["resident_pages"] == 600
    assert not list(Path("/dev/shm").glob(f"maru-bench-{process.pid}-*"))


def test_many_resident_pages_are_in_the_pool_before_the_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "_FILLED_BY_SERVER", 1000)
    said: list[str] = []
    found = metadata.run(metadata.MetadataOptions(pages=[16], repeats=3, resident=2000), said.append)
    assert "committing 2000 pages" in said
    assert found.start_new_s is None
    assert found.resident_pages == 2000
    assert [row.operation for row in found.rows] == ["match", "reserve", "commit", "reserve+commit"]
