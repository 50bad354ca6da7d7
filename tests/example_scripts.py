"""Runs the scripts of ``examples/`` with a stand-in for their Python, and tells what they start.

Everything of a script is real but the engines: where it would start one, the command line is written down and a server that speaks
like one takes its place (:mod:`tests.bench.speaking_engines`), so the script goes on to its end. What is started of Maru runs, but for the
agent. ``python -m example_scripts LOG WORDS...`` is that stand-in.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENGINES = {"sglang.launch_server": "sglang", "vllm.entrypoints.openai.api_server": "vllm"}


def command_lines(script: str, scratch: Path) -> list[list[str]]:
    """Words after the interpreter of everything that the script starts, in order.

    Raises:
        AssertionError: the script failed.
    """
    log = scratch / "started"
    python = scratch / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="{ROOT}:{ROOT}/tests:$PYTHONPATH" exec {sys.executable} {__file__} {log} "$@"\n'
    )
    python.chmod(0o755)
    environment = {**os.environ, "SGLANG_PYTHON": str(python), "VLLM_PYTHON": str(python), "PAUSE": "0"}
    environment.pop("MODEL", None)
    done = subprocess.run(
        [str(ROOT / "examples" / script)], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, f"{script}: {done.stdout}{done.stderr}"
    assert "the answers are alike" in done.stdout, done.stdout
    return [json.loads(line) for line in log.read_text().splitlines()]


def _stand_in(log: str, words: list[str]) -> None:
    module = words[1] if words[0] == "-m" else ""
    real = [sys.executable, *words]
    if module.startswith(("sglang", "vllm", "maru_server", "maru_agent", "maru_engine_kit")):
        with open(log, "a") as file:
            file.write(json.dumps(words) + "\n")
    if module in ENGINES:
        from tests.bench.speaking_engines import SpeakingEngine

        port = int(words[words.index("--port") + 1])
        engine = SpeakingEngine(kind=ENGINES[module], port=port)
        signal.sigwait({signal.SIGTERM})
        engine.close()
    elif module in ("maru_agent", "maru_server.operator", "maru_engine_kit.models"):
        # The agent needs NIXL; without an engine there is nothing to show; a model is not needed.
        if module == "maru_agent":
            signal.sigwait({signal.SIGTERM})
    else:
        os.execv(real[0], real)


if __name__ == "__main__":
    _stand_in(sys.argv[1], sys.argv[2:])
