"""How SGLang servers of this host were started: flags with which they do not read from Maru, or rarely, or from another one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from maru_server.operator.findings import OK, WARN, Finding

PROC: Final = Path("/proc")
#: SGLang's default of prefetch_threshold, tokens (cache_controller.py).
SGLANG_THRESHOLD: Final = 256
#: Above this, new tokens of a prompt are many.
_HIGH_THRESHOLD: Final = 2048

_THRESHOLD: Final = (
    f"SGLang asks its storage only about prompts with at least prefetch_threshold new tokens ({SGLANG_THRESHOLD}; a key of "
    "--hicache-storage-backend-extra-config), loads into at most half of its host cache (--hicache-ratio, --hicache-size), and with "
    "--hicache-storage-prefetch-policy timeout gives up after prefetch_timeout_base (1 s) plus prefetch_timeout_per_ki_token (0.25 s)"
)


@dataclass(frozen=True, slots=True)
class SglangProcess:
    """One SGLang server on this host, as its command line has it."""

    pid: int
    arguments: tuple[str, ...]
    uid: int
    environ: dict[str, str] | None = field(default=None, repr=False)  # None: not for this user to read

    def value(self, *names: str) -> str | None:
        """Of ``--name value`` or ``--name=value``, the last one."""
        found = None
        for at, word in enumerate(self.arguments):
            for name in names:
                if word == name and at + 1 < len(self.arguments):
                    found = self.arguments[at + 1]
                elif word.startswith(name + "="):
                    found = word[len(name) + 1 :]
        return found

    def has(self, *names: str) -> bool:
        return any(name in self.arguments for name in names)


def sglang_processes(proc: Path = PROC) -> list[SglangProcess]:
    """SGLang servers whose command lines this user can read."""
    found = []
    for entry in proc.iterdir():
        if entry.name.isdigit():
            try:
                words = _words(entry / "cmdline")
                if "sglang.launch_server" in words or _is_serve(words):
                    found.append(SglangProcess(int(entry.name), tuple(words), entry.stat().st_uid, _environ(entry)))
            except OSError:
                continue
    return sorted(found, key=lambda process: process.pid)


def _words(path: Path) -> list[str]:
    return path.read_bytes().decode(errors="replace").split("\0")


def _environ(entry: Path) -> dict[str, str] | None:
    try:
        return dict(word.partition("=")[::2] for word in _words(entry / "environ") if "=" in word)
    except OSError:
        return None


def _is_serve(words: list[str]) -> bool:
    return any(Path(word).name == "sglang" for word in words[:2]) and "serve" in words[:4]


def check_sglang(processes: Iterable[SglangProcess], endpoint: str | None = None) -> list[Finding]:
    """Flags with which SGLang does not use its storage, or rarely. What is not on the command line cannot be seen.

    Args:
        endpoint: of the server that is looked at, or several separated by commas; None: whichever.
    """
    findings = [found for process in processes for found in _check_flags(process, endpoint)]
    return findings or [
        Finding("sglang", OK, "nothing is wrong with the command lines of SGLang servers on this host", _THRESHOLD)
    ]


def _check_flags(process: SglangProcess, endpoint: str | None) -> list[Finding]:
    who = f"SGLang (pid {process.pid})"
    backend = process.value("--hicache-storage-backend")
    found = []
    if backend is None:
        return [
            Finding(
                "sglang",
                WARN,
                f"{who} was started without a storage backend",
                "add --enable-hierarchical-cache --hicache-storage-backend maru, or attach it at run time (docs/sglang.md)",
            )
        ]
    if backend not in ("maru", "dynamic"):
        return [Finding("sglang", WARN, f"{who} has the storage backend {backend!r}", "--hicache-storage-backend maru")]
    if not process.has("--enable-hierarchical-cache", "--enable-hicache"):
        found.append(
            Finding(
                "sglang",
                WARN,
                f"{who} has a storage backend and no hierarchical cache: it never uses it",
                "add --enable-hierarchical-cache",
            )
        )
    policy = process.value("--hicache-storage-prefetch-policy")
    if policy == "best_effort":
        found.append(
            Finding(
                "sglang",
                WARN,
                f"{who} has --hicache-storage-prefetch-policy best_effort: a request does not wait for its pages, and computes them",
                "use timeout (SGLang's default) or wait_complete",
            )
        )
    write = process.value("--hicache-write-policy")
    if write in ("write_back", "write_through_selective"):
        when = "until it is evicted from the GPU" if write == "write_back" else "until a prefix is seen again"
        found.append(
            Finding(
                "sglang",
                WARN,
                f"{who} has --hicache-write-policy {write}: nothing is stored {when}",
                "use write_through (SGLang's default), which stores what is computed at once",
            )
        )
    extra = _extra(process.value("--hicache-storage-backend-extra-config"))
    return (
        found if extra is None else [*found, *_check_server(who, process, extra, endpoint), *_check_extra(who, extra)]
    )


def _extra(text: str | None) -> dict[str, Any] | None:
    """The extra config; None where it cannot be seen from here."""
    if text is None:
        return {}
    try:
        extra = json.loads(text)
    except ValueError:
        return None  # the name of a file, most likely
    return extra if isinstance(extra, dict) else None


def _check_server(who: str, process: SglangProcess, extra: dict[str, Any], endpoint: str | None) -> list[Finding]:
    """Whether it uses the server that is looked at."""
    if endpoint is None or process.environ is None:
        return []
    directory = process.environ.get("MARU_RUNTIME_DIR") or f"/tmp/maru-{process.uid}"
    theirs = extra.get("server") or process.environ.get("MARU_SERVER") or f"ipc://{directory}/server.sock"
    if not isinstance(theirs, str) or {*theirs.split(",")} & {*endpoint.split(",")}:
        return []
    return [
        Finding(
            "sglang",
            WARN,
            f"{who} uses the server at {theirs}, and not the one that is looked at ({endpoint})",
            'give both the same: "server" in the extra config, or MARU_SERVER; `maru doctor --server` looks at the other',
        )
    ]


def _check_extra(who: str, extra: dict[str, Any]) -> list[Finding]:
    threshold = extra.get("prefetch_threshold")
    if isinstance(threshold, int) and threshold > _HIGH_THRESHOLD:
        return [
            Finding(
                "sglang",
                WARN,
                f"{who} has prefetch_threshold {threshold}: prompts with fewer new tokens are never read from storage",
                f"leave it out ({SGLANG_THRESHOLD})",
            )
        ]
    return []
