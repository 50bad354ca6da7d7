"""The prefix-sharing experiment around its servers: prompts, choices, clean ends. The whole of it is ``make demo``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from maru_bench.machine import choose_device, find_python
from maru_bench.prefix_sharing import CHUNK_TOKENS, PAGE_TOKENS, TAIL_TOKENS, make_prompts
from maru_core.errors import ConfigError
from tests.support import await_condition


def test_prompts_are_whole_chunks_and_a_tail_shorter_than_a_page() -> None:
    prompts = make_prompts(6, 512, seed=0)
    for prompt in prompts:
        assert len(prompt) % CHUNK_TOKENS == TAIL_TOKENS < PAGE_TOKENS
        assert 1000 <= len(prompt) <= 2000
        assert all(0 < token < 512 for token in prompt)


def test_prompts_share_no_page_and_come_again_from_their_seed() -> None:
    prompts = make_prompts(6, 512, seed=3)
    assert len({tuple(prompt[:PAGE_TOKENS]) for prompt in prompts}) == 6
    assert prompts == make_prompts(6, 512, seed=3)
    assert prompts != make_prompts(6, 512, seed=4)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert choose_device("auto") == "cpu"
    with pytest.raises(ConfigError, match="give --device cpu"):
        choose_device("cuda")
    listing = tmp_path / "nvidia-smi"
    listing.write_text("#!/bin/sh\necho 'GPU 0: a card'\n")
    listing.chmod(0o755)
    assert choose_device("auto") == "cuda"


def test_an_unknown_device_or_interpreter_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'tpu'"):
        choose_device("tpu")
    with pytest.raises(ConfigError, match="--python /nowhere/python"):
        find_python("/nowhere/python")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 512}))
    return folder


def _command(python: Path, model: Path, out: Path, *more: str) -> list[str]:
    command = [sys.executable, "-m", "maru_bench", "prefix-sharing", "--python", str(python), "--model", str(model)]
    return [*command, "--device", "cpu", "--out", str(out), *more]


def _script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_it_stops_every_process_it_started(tmp_path: Path, model: Path, number: int) -> None:
    pids = tmp_path / "pids"
    python = _script(tmp_path / "python", f"echo $$ >> {pids}\nsleep 600 &\necho $! >> {pids}\nwait")
    command = _command(python, model, tmp_path / "out")
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests that run in the background have it ignored
    )  # fmt: skip
    pool = f"maru-bench-{process.pid}-*"

    def started() -> list[int]:
        assert process.poll() is None, process.communicate()[0]
        return [int(line) for line in pids.read_text().split()] if pids.exists() else []

    await_condition(lambda: len(started()) == 4, "both servers are starting")
    children = started()
    assert list(Path("/dev/shm").glob(pool))
    os.kill(process.pid, number)
    process.communicate(timeout=180)
    assert process.returncode not in (0, None)
    await_condition(lambda: not any(_alive(pid) for pid in children), "all are gone")
    assert not list(Path("/dev/shm").glob(pool))


def test_a_server_that_does_not_start_is_told_with_the_end_of_its_log(tmp_path: Path, model: Path) -> None:
    python = _script(tmp_path / "python", "echo this model has no weights\nexit 3")
    done = subprocess.run(
        _command(python, model, tmp_path / "out", "--backend", "file"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "ended with status 3" in done.stderr
    assert "this model has no weights" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "out" / "logs").iterdir())


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--backend", "redis"), "give maru or file"),
        (("--model", "/nowhere/model"), "no config.json"),
        (("--device", "tpu"), "give auto, cpu or cuda"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, model: Path, arguments: tuple[str, str], what: str) -> None:
    command = _command(Path(sys.executable), model, tmp_path / "out", *arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert what in " ".join(done.stderr.split())
