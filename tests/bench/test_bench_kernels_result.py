"""``maru-bench kernels``: its arithmetic and its refusals, which need no torch."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from maru_bench.cli import app
from maru_bench.kernels.models import MODELS
from maru_bench.kernels.result import Checked, KernelRow, KernelsResult, human, make_row


def row(**gbps: float) -> KernelRow:
    """Three samples of each peer with those rates as medians."""
    moved = {name: (1 + index) * 10**9 for index, name in enumerate(gbps)}
    seconds = {name: [moved[name] / rate / 1e9 * factor for factor in (9, 1, 0.5)] for name, rate in gbps.items()}
    return make_row("m", 16, "load", 4096, 64, seconds, moved, {"maru": 1.25}, {"maru": 40.0})


def result(*rows: KernelRow, problem: str = "") -> KernelsResult:
    checked = Checked(model="m", page_tokens=16, peer="maru", nbytes=4096, problem=problem)
    return KernelsResult(
        machine={"gpu": "Card"},
        seed=1,
        repeats=3,
        sample_bytes=1,
        chosen="",
        pinning="",
        checked=[checked],
        absent={},
        rows=list(rows),
    )


def test_rates_are_of_the_medians_and_ratios_are_of_the_rates() -> None:
    one = row(maru=48, link=50, memcpy=4, batched=24)
    assert one.gbps == pytest.approx({"maru": 48, "link": 50, "memcpy": 4, "batched": 24})
    assert one.to_link == pytest.approx(0.96)
    assert one.to_rivals == pytest.approx({"batched": 2, "memcpy": 12})


@pytest.mark.parametrize(
    ("rates", "met"),
    [
        ({"maru": 48, "link": 50, "memcpy": 4}, True),
        ({"maru": 47, "link": 50, "memcpy": 4}, False),
        ({"maru": 48, "link": 50, "memcpy": 4, "sglang": 49}, False),
        ({"maru": 48, "link": 50, "kernel": 49}, True),  # Maru's own
    ],
)
def test_the_target_is_the_link_and_every_rival(rates: dict[str, float], met: bool) -> None:
    assert row(**rates).met is met
    assert result(row(maru=50, link=50), row(**rates)).targets_met is met


def test_one_wrong_byte_is_a_failure_and_so_is_nothing_checked() -> None:
    assert result().ok
    assert not result(problem="1 bytes").ok
    assert not KernelsResult(
        machine={}, seed=1, repeats=1, sample_bytes=1, chosen="", pinning="", checked=[], absent={}, rows=[]
    ).ok


def test_all_of_it_is_written(tmp_path: Path) -> None:
    one = row(maru=48, link=50)
    file = tmp_path / "kernels.json"
    result(one).write_json(file)
    data = json.loads(file.read_text())
    assert data["machine"] == {"gpu": "Card"}
    assert data["rows"][0]["gbps"]["link"] == pytest.approx(50)
    assert data["rows"][0]["slowdown"] == {"maru": 1.25}
    assert len(result(one).tables()) == 2
    assert len(result().tables()) == 1


@pytest.mark.parametrize(("nbytes", "text"), [(256, "256 B"), (2048, "2 KiB"), (73728, "72 KiB"), (3 << 19, "1.5 MiB")])
def test_sizes_for_people(nbytes: int, text: str) -> None:
    assert human(nbytes) == text


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed here")
def test_without_torch_it_names_the_environment_that_has_it() -> None:
    command = [sys.executable, "-m", "maru_bench", "kernels", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "needs torch, which is not installed here" in done.stderr
    assert ".venv-sglang/bin/python -m maru_bench kernels" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_models_are_those_of_their_configurations() -> None:
    assert MODELS["llama-3.1-8b"].token_bytes == 131072
    assert MODELS["llama-3.1-70b-tp8"].token_bytes == 40960
    assert MODELS["deepseek-v3"].token_bytes == 70272


def test_the_page_about_it_names_its_options_and_models_and_no_others() -> None:
    text = (Path(__file__).parents[2] / "docs/performance.md").read_text()
    section = re.search(r"^## Between the GPU and the pool\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert section
    command = typer.main.get_command(app).commands["kernels"]  # type: ignore[attr-defined]
    options = {parameter.opts[0] for parameter in command.params} - {"--help"}
    assert set(re.findall(r"(?<![\w-])--[a-z]+", section[1])) == options
    for name, model in MODELS.items():
        per_layer = f"{human(model.row_bytes)}".replace("1.125 KiB", "1152 B")
        assert re.search(rf"`{re.escape(name)}` \({model.layers} layers, [^)]*{per_layer}", section[1])
