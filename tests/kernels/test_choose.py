"""What is chosen from what was measured, and how that is kept."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_recorder import Recorder

from maru_sglang.kernels import choose
from maru_sglang.kernels.choose import Choice, Choices, choices, decide
from maru_sglang.kernels.runtime import Runtime

#: Any device that is not a CPU; nothing is asked of it.
DEVICE = torch.device("meta")
RATES = {
    "gather": {1024: {"kernel/4": 10.0, "kernel/8": 19.0, "kernel/16": 20.0, "dma": 2.0}, 65536: {"kernel/4": 40.0, "dma": 45.0}},
    "scatter": {1024: {"kernel/4": 10.0, "dma": 9.0}, 65536: {"kernel/4": 40.0, "dma": 39.0}},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    """Each test is a process that has not chosen yet."""
    choose._chosen.clear()
    yield
    choose._chosen.clear()


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    return Runtime(Recorder(tmp_path_factory.mktemp("recorder")).path, 0)


def counted(result: Any) -> tuple[Callable[..., Any], list[Any]]:
    calls: list[Any] = []

    def measure(*arguments: Any) -> Any:
        calls.append(arguments)
        if isinstance(result, Exception):
            raise result
        return result

    return measure, calls


@pytest.mark.parametrize(
    ("rates", "choice"),
    [
        ({"kernel/4": 10.0, "kernel/8": 20.0, "kernel/16": 20.5, "dma": 5.0}, Choice("kernel", 8)),
        ({"kernel/4": 50.0, "kernel/8": 50.0, "dma": 46.0}, Choice("kernel", 4)),
        ({"kernel/4": 50.0, "kernel/8": 50.0, "dma": 48.0}, Choice("dma")),
        ({"kernel/4": 50.0, "dma": 60.0}, Choice("dma")),
        ({"dma": 1.0}, Choice("dma")),
        ({"kernel/32": 1.0}, Choice("kernel", 32)),
    ],
)
def test_copy_engines_where_they_are_near_else_the_fewest_programs(rates: dict[str, float], choice: Choice) -> None:
    assert decide(rates) == choice


def test_the_nearest_size_is_taken() -> None:
    found = Choices.of_rates(RATES)
    assert [found.pick("gather", size) for size in (1, 1024, 7000, 9000, 1 << 30)] == [
        Choice("kernel", 8), Choice("kernel", 8), Choice("kernel", 8), Choice("dma"), Choice("dma"),
    ]  # fmt: skip
    assert found.pick("scatter", 1024) == Choice("kernel", 4)


def test_on_a_cpu_nothing_is_measured(tmp_path: Path, runtime: Runtime) -> None:
    measure, calls = counted(RATES)
    found = choices(torch.device("cpu"), runtime, folder=tmp_path, measure=measure)
    assert {found.pick(direction, 4096) for direction in choose.DIRECTIONS} == {Choice("cpu")}
    assert not calls
    assert not list(tmp_path.iterdir())


def test_measured_once_told_once_and_kept(tmp_path: Path, runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = tmp_path / "not" / "there"
    measure, calls = counted(RATES)
    first = choices(DEVICE, runtime, folder=folder, measure=measure)
    assert choices(DEVICE, runtime, folder=folder, measure=measure) is first
    assert len(calls) == 1
    assert first == Choices.of_rates(RATES)
    told = [record.message for record in caplog.records]
    assert len(told) == 1
    assert "measured now" in told[0]
    assert "1024 B kernel of 8 programs, 65536 B dma" in told[0]

    choose._chosen.clear()  # the next process
    assert choices(DEVICE, runtime, folder=folder, measure=measure) == first
    assert len(calls) == 1
    assert "measured before" in caplog.records[-1].message
    assert sorted(path.name for path in folder.iterdir()) == ["kernels-1.json", "kernels.lock"]


def test_another_gpu_or_software_is_measured_for_itself(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, calls = counted(RATES)
    for torch_version in ("one", "two", "one"):
        choose._chosen.clear()
        monkeypatch.setattr(torch, "__version__", torch_version)
        choices(DEVICE, runtime, folder=tmp_path, measure=measure)
    assert len(calls) == 2


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"x": 1}', '{"x": {"gather": {}}}', '{"x": {"gather": {"a": {}}, "scatter": {}}}', "\xff"]
)
def test_a_file_that_cannot_be_read_counts_as_nothing(tmp_path: Path, runtime: Runtime, text: str) -> None:
    path = tmp_path / "kernels-1.json"
    path.write_text(text, "latin-1")
    measure, calls = counted(RATES)
    assert choices(DEVICE, runtime, folder=tmp_path, measure=measure) == Choices.of_rates(RATES)
    assert len(calls) == 1
    assert len(json.loads(path.read_text())) == 1


def test_a_folder_that_cannot_be_written_and_a_measurement_that_fails_keep_nobody(
    tmp_path: Path, runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    measure, _ = counted(RATES)
    assert choices(DEVICE, runtime, folder=in_the_way, measure=measure) == Choices.of_rates(RATES)
    assert "cannot be written" in caplog.text

    choose._chosen.clear()
    measure, _ = counted(RuntimeError("out of memory"))
    found = choices(DEVICE, runtime, folder=tmp_path, measure=measure)
    assert found.pick("gather", 4096) == found.pick("scatter", 4096) == Choice("kernel")
    assert "out of memory" in caplog.text
