"""The prefix-sharing experiment: two real SGLang servers, one store, the same prompts in four phases.

=============  ==================================================================================================
phase          what happens
=============  ==================================================================================================
cold           server A answers every prompt for the first time: all is computed, and stored behind the answer
second server  server B, which has seen nothing, answers them: the prefixes must come from the store
after a flush  A's own caches are emptied and it answers again: the prefixes must come from the store
store stopped  the store is killed, A's caches are emptied, and it answers again: all must be computed
=============  ==================================================================================================

Every phase must give the very tokens and the very log probabilities of the cold run. To make that a fair demand
of floating point, a prompt is some whole prefill chunks and a few tokens more: then the cold run computes the last
chunk in the same shapes as a run that loaded everything before it, and the two may not differ in one bit.

Before the phases each server answers one prompt of its own of the same length as the others, so that one-off costs
of a fresh process count in no phase.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from maru_bench.processes import scratch_directory
from maru_bench.report import Phase, Report
from maru_bench.servers import (
    MaruServer,
    ServerFailedError,
    SGLangOptions,
    SGLangServer,
    wait_all_ready,
)
from maru_core.errors import ConfigError
from maru_core.session import Session

#: Told what is being done now; called again and again while it takes time.
Narrate = Callable[[str], None]

PAGE_TOKENS: Final = 16
CHUNK_TOKENS: Final = 256
#: Tokens of each prompt beyond whole chunks: what is computed even where everything else was loaded.
TAIL_TOKENS: Final = 9
#: Whole chunks of the prompts, one after the other and around again: prompts of about 1000 to 1800 tokens.
PROMPT_CHUNKS: Final = (4, 6, 7, 5)
_START_S: Final = 600.0
_POLL_S: Final = 0.2


class ExperimentOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to run the experiment with."""

    python: str
    """Interpreter of the environment that has SGLang (and Maru) installed."""
    out: Path
    """Directory for the report, and for the logs if something fails."""
    model: str | None = None
    """None: the engine kit's demo model, made from a seed."""
    device: Literal["cpu", "cuda"] = "cpu"
    backend: Literal["maru", "file"] = "maru"
    server: str | None = None
    """A Maru server that runs already; None starts one. Its phase "store stopped" is then left out."""
    prompts: int = 3
    new_tokens: int = 16
    pool_size: str = "1G"
    seed: int = 0
    engine_arguments: tuple[str, ...] = ()


# ------------------------------------------------------------------ the store


class _MaruStore:
    """The Maru server of an experiment: one of its own, or one that runs already."""

    def __init__(self, directory: Path, options: ExperimentOptions, log: Path) -> None:
        self._own = None if options.server else MaruServer(directory, size=options.pool_size, log=log)
        self._endpoint = options.server or (self._own.endpoint if self._own else "")
        self.can_stop = self._own is not None
        self.extra_config: dict[str, object] = {"server": self._endpoint}
        self.env: dict[str, str] = {}
        self._session: Session | None = None

    def start(self) -> None:
        if self._own is not None:
            self._own.start()
        self._session = Session(self._endpoint, name="maru-bench prefix-sharing", timeout_s=5.0)
        self._session.connect()

    def objects(self) -> int:
        """How many objects are stored now."""
        assert self._session is not None
        return int(self._session.stats()["objects"])

    def stop(self) -> None:
        """As a crash would."""
        # First its own session: it would report what is done here on purpose.
        if self._session is not None:
            self._session.close()
        if self._own is not None:
            self._own.kill()

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        if self._own is not None:
            self._own.stop()


class _FileStore:
    """SGLang's own ``file`` backend: one file per page in a directory. For comparison."""

    can_stop = True

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "pages"
        self.extra_config: dict[str, object] = {}
        self.env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(self._directory)}

    def start(self) -> None:
        self._directory.mkdir()

    def objects(self) -> int:
        return sum(1 for _ in self._directory.iterdir())

    def stop(self) -> None:
        for path in self._directory.iterdir():
            path.unlink()

    def close(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


_AnyStore = _MaruStore | _FileStore


# ------------------------------------------------------------------ the experiment


def run_experiment(options: ExperimentOptions, narrate: Narrate) -> Report:
    """Run all phases and judge them. Whatever was started is stopped on every way out.

    Raises:
        ConfigError: something that the user named cannot be used.
        ServerFailedError: a server did not start. What goes wrong later is in the report.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    model = options.model or demo_model(options.python, narrate)
    vocabulary = _vocabulary(model)
    prompts = make_prompts(options.prompts + 2, vocabulary, options.seed)
    asked, warm_up = prompts[: options.prompts], prompts[options.prompts :]
    logs = options.out / "logs"
    report = Report(
        backend=options.backend,
        device=options.device,
        model=model,
        prompt_tokens=[len(prompt) for prompt in asked],
        new_tokens=options.new_tokens,
        page_tokens=PAGE_TOKENS,
    )
    with contextlib.ExitStack() as stack:
        # A Unix socket's path is limited to 107 bytes, so not below --out.
        scratch = stack.enter_context(scratch_directory())
        store: _AnyStore = (
            _MaruStore(scratch, options, logs / "maru-server.log") if options.backend == "maru" else _FileStore(scratch)
        )
        stack.callback(store.close)
        narrate("starting the store")
        store.start()
        before = store.objects()
        servers = _start_engines(stack, options, model, store, logs, narrate)
        for server, prompt in zip(servers, warm_up, strict=True):
            narrate(f"warming up {server.name}")
            server.generate(prompt, options.new_tokens)
        pages = before + sum(len(prompt) // PAGE_TOKENS for prompt in prompts)
        _run_phases(report, servers, store, asked, pages, options, narrate)
    report.judge()
    return report


def _start_engines(
    stack: contextlib.ExitStack,
    options: ExperimentOptions,
    model: str,
    store: _AnyStore,
    logs: Path,
    narrate: Narrate,
) -> list[SGLangServer]:
    """Two servers, started at once, ready."""
    gpus = _gpu_count() if options.device == "cuda" else 0
    servers = []
    for index, name in enumerate(("server A", "server B")):
        arguments: tuple[str, ...] = ()
        if options.device == "cuda":
            # Each its own GPU where there are two, else a part of the one; --mem-fraction-static counts the whole GPU.
            arguments = ("--base-gpu-id", "1") if index and gpus > 1 else ()
            arguments += ("--mem-fraction-static", "0.8" if gpus > 1 else "0.4")
        sglang = SGLangOptions(
            python=options.python,
            model=model,
            device=options.device,
            backend=options.backend,
            extra_config=store.extra_config,
            page_size=PAGE_TOKENS,
            max_total_tokens=max(8192, 2 * sum(prompt_length(i) for i in range(options.prompts + 1))),
            chunk_tokens=CHUNK_TOKENS,
            dtype="bfloat16",
            arguments=(*arguments, *options.engine_arguments),
            env=store.env,
        )
        server = SGLangServer(name, sglang, logs / f"{name.replace(' ', '-')}.log")
        stack.callback(server.stop)
        server.start()
        servers.append(server)

    def waiting(names: Sequence[str], elapsed: float) -> None:
        state = f"waiting for {' and '.join(names)}" if names else "both are up"
        narrate(f"starting two SGLang servers: {state} ({elapsed:.0f} s; about 90 s on two cores)")

    wait_all_ready(servers, timeout_s=_START_S, progress=waiting)
    return servers


def _run_phases(
    report: Report,
    servers: Sequence[SGLangServer],
    store: _AnyStore,
    prompts: Sequence[Sequence[int]],
    pages: int,
    options: ExperimentOptions,
    narrate: Narrate,
) -> None:
    """Fill in ``report.phases``. A phase that fails is the last: the ones after it would compare nothing."""
    first, second = servers
    name = "Maru" if options.backend == "maru" else "store"
    phases: list[tuple[Phase, SGLangServer, Callable[[], None]]] = [
        (Phase(key="cold", title="cold", server="A", from_store=False), first, lambda: None),
        (
            Phase(key="second_server", title="second server", server="B", from_store=True),
            second,
            lambda: _await_stored(store, pages, narrate),
        ),
        (Phase(key="after_flush", title="after a flush", server="A", from_store=True), first, first.flush),
    ]
    if store.can_stop:

        def stop() -> None:
            first.flush()
            store.stop()

        phases.append((Phase(key="store_stopped", title=f"{name} stopped", server="A", from_store=False), first, stop))
    for phase, server, prepare in phases:
        report.phases.append(phase)
        try:
            narrate(f"{phase.title}: preparing")
            prepare()
            for number, prompt in enumerate(prompts):
                narrate(
                    f"{phase.title}: {server.name} answers prompt {number + 1} of {len(prompts)} ({len(prompt)} tokens)"
                )
                phase.answers.append(server.generate(prompt, options.new_tokens))
        except ServerFailedError as error:
            phase.error = str(error)
            return


def _await_stored(store: _AnyStore, pages: int, narrate: Narrate) -> None:
    """Wait until the store holds ``pages`` pages: SGLang stores behind the answer.

    Gives up when nothing more has come for 10 seconds: what is missing shows in the phase that needs it.
    """
    seen, changed = -1, time.monotonic()
    while (now := store.objects()) < pages and time.monotonic() - changed < 10.0:
        if now != seen:
            seen, changed = now, time.monotonic()
        narrate(f"waiting for the pages to be stored: {now} of {pages}")
        time.sleep(_POLL_S)


# ------------------------------------------------------------------ what it runs with


def prompt_length(index: int) -> int:
    """Tokens of prompt ``index``."""
    return PROMPT_CHUNKS[index % len(PROMPT_CHUNKS)] * CHUNK_TOKENS + TAIL_TOKENS


def make_prompts(count: int, vocabulary: int, seed: int) -> list[list[int]]:
    """``count`` prompts of token ids, no two with a common prefix, from a seed."""
    choose = random.Random(seed)
    # The lowest ids are special tokens in most vocabularies.
    low, high = min(16, vocabulary // 4), min(vocabulary, 30_000)
    return [
        [low + index] + [choose.randrange(low, high) for _ in range(prompt_length(index) - 1)] for index in range(count)
    ]


def _vocabulary(model: str) -> int:
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


def demo_model(python: str, narrate: Narrate) -> str:
    """The engine kit's demo model, made by the kit from a seed; kept inside the environment it was made with.

    Raises:
        ConfigError: that environment has no engine kit.
    """
    # Not resolved: the interpreter of a virtual environment is a link out of it.
    target = Path(python).absolute().parent.parent / "maru-models" / "demo"
    narrate("making the demo model")
    made = subprocess.run(
        [python, "-m", "maru_engine_kit.models", "make-llama", str(target), "--size", "demo"],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise ConfigError(
            f"{python} could not make the demo model: {made.stderr.strip().splitlines()[-1:] or 'no output'}: "
            "name a model with --model, or set the environment up again with make sglang-env"
        )
    return str(target)


def _gpu_count() -> int:
    """GPUs of this machine that NVIDIA's tool lists; 0 without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    listed = subprocess.run([program, "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0


def choose_device(wanted: str) -> Literal["cpu", "cuda"]:
    """``auto`` is the GPU where there is one.

    Raises:
        ConfigError: another word, or a GPU is asked for and there is none.
    """
    if wanted == "auto":
        return "cuda" if _gpu_count() else "cpu"
    if wanted == "cuda" and not _gpu_count():
        raise ConfigError("--device cuda, but nvidia-smi lists no GPU: give --device cpu")
    if wanted not in ("cpu", "cuda"):
        raise ConfigError(f"--device is {wanted!r}: give auto, cpu or cuda")
    return "cuda" if wanted == "cuda" else "cpu"


def find_python(named: str | None) -> str:
    """The interpreter that has SGLang: the one named, else ``.venv-sglang`` in the present directory or the checkout.

    Raises:
        ConfigError: there is none.
    """
    if named is not None:
        found = shutil.which(named)
        if found is None:
            raise ConfigError(f"--python {named} is not a program: name the interpreter of the environment with SGLang")
        return found
    roots = (Path.cwd(), Path(__file__).resolve().parent.parent)
    for root in roots:
        python = root / ".venv-sglang" / "bin" / "python"
        if python.exists():
            return str(python)
    raise ConfigError(
        f"no environment with SGLang in {' or '.join(str(root / '.venv-sglang') for root in roots)}: "
        "run make sglang-env, or name its interpreter with --python"
    )


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
