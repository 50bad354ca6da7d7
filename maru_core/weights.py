"""Which weights a process really runs with, as a digest of their content.

Two fine-tunes under one served name must never share KV, and the same weights at two paths should. So neither the name
nor the path nor the time of a file enters the digest, but what is in it: small files whole; of large ones the size, the
safetensors header (names, shapes, types) and samples of every tensor. A change that leaves all samples of a tensor as they
were (a few rows of an embedding) is not seen: operators who patch weights that way set ``tag``.

Knows no engine's arguments, and never downloads.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Final

from maru_core.errors import ConfigError

#: Files that hold weights, by suffix: what the engines' loaders read.
WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
#: Files beside the weights that change what a model computes: quantisation, image preprocessing, adapter settings.
SETTING_FILES: Final = (
    "config.json",
    "params.json",
    "adapter_config.json",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    "quant_model_description.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
#: A file up to this size is read whole, bytes.
WHOLE_FILE: Final = 32 << 20
#: Bytes of one sample, and samples per tensor of a large file.
SAMPLE_BYTES: Final = 16 << 10
TENSOR_SAMPLES: Final = 4
#: Samples of a large file of which the tensors are not known (no safetensors header).
FILE_SAMPLES: Final = 1024
_HEADER_MAX: Final = 100 << 20


def locate_model(path: str, revision: str | None, cache_dir: str | None, *, option: str) -> Path:
    """The directory (or single file) on this machine that holds the weights of ``path``.

    Args:
        path: a local path, or a Hugging Face repository that has been downloaded.
        option: the engine's option that ``path`` came from, for the message.
    Raises:
        ConfigError: it is on this machine under neither.
    """
    local = Path(path)
    if local.exists():
        return local
    if "://" not in path:
        try:
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(path, revision=revision, cache_dir=cache_dir, local_files_only=True))
        except ImportError:
            pass
        except Exception as error:
            raise ConfigError(_cannot_locate(path, option)) from error
    raise ConfigError(_cannot_locate(path, option))


def _cannot_locate(path: str, option: str) -> str:
    return (
        f"the weights of {path!r} are neither a local path nor in this machine's Hugging Face cache, so Maru cannot tell them "
        f"from other weights of the same name: give {option} a local directory"
    )


def weights_digest(path: Path, *, option: str, suffixes: tuple[str, ...] = (), code: bool = False) -> str:
    """Hex SHA-256 of the weights at ``path`` (a directory, or one file) and of the settings beside them.

    Args:
        option: the engine's option that names ``path``, for the message.
        suffixes: which files are read as weights; empty: ``.safetensors`` where there are any, else all of
            ``WEIGHT_SUFFIXES``, as the default loaders of SGLang and vLLM do.
        code: also digest ``*.py``, for models that run code of their own (``--trust-remote-code``).
    Raises:
        ConfigError: no weights there, or a file that cannot be read.
    """
    digest = hashlib.sha256(b"maru-weights-1")
    try:
        files = [path] if path.is_file() else _files(path, suffixes, code)
        if not any(file.name.endswith(WEIGHT_SUFFIXES) for file in files):
            raise ConfigError(
                f"{path} holds no weights that Maru can tell apart ({', '.join(suffixes or WEIGHT_SUFFIXES)}): give "
                f"{option} a directory that does"
            )
        for file in files:
            size = file.stat().st_size
            name = file.name.encode()
            digest.update(b"\0file" + len(name).to_bytes(4, "little") + name + size.to_bytes(8, "little"))
            with file.open("rb") as stream:
                for start, length in _spans(stream, file.name, size):
                    digest.update(start.to_bytes(8, "little") + length.to_bytes(8, "little"))
                    _feed(digest, stream, start, length)
    except OSError as error:
        raise ConfigError(
            f"cannot read the weights at {path} ({error}): make them readable for this process"
        ) from error
    return digest.hexdigest()


def file_digest(path: str) -> str:
    """Hex SHA-256 of a whole file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error}): make it readable, or leave the option out") from error


def _files(directory: Path, suffixes: tuple[str, ...], code: bool) -> list[Path]:
    names = [entry.name for entry in os.scandir(directory) if entry.is_file()]
    if not suffixes:
        safe = any(name.endswith(".safetensors") for name in names)
        suffixes = (".safetensors",) if safe else WEIGHT_SUFFIXES
    wanted = [n for n in names if n.endswith(suffixes) or n in SETTING_FILES or (code and n.endswith(".py"))]
    return [directory / name for name in sorted(wanted)]


def _spans(stream: BinaryIO, name: str, size: int) -> Iterable[tuple[int, int]]:
    """What to read of a file: (offset, bytes)."""
    if size <= WHOLE_FILE or not name.endswith(WEIGHT_SUFFIXES):
        return [(0, size)]
    if name.endswith(".safetensors"):
        tensors = _tensors(stream, size)
        if tensors is not None:
            header, spans = tensors
            return [(0, header), *(s for start, stop in spans for s in _samples(start, stop, TENSOR_SAMPLES))]
    return _samples(0, size, FILE_SAMPLES)


def _tensors(stream: BinaryIO, size: int) -> tuple[int, list[tuple[int, int]]] | None:
    """End of the header, and start and end of every tensor, of a safetensors file; None if it is not one.

    Format: 8 bytes little-endian length, JSON header, data (https://huggingface.co/docs/safetensors).
    """
    stream.seek(0)
    length = int.from_bytes(stream.read(8), "little")
    if not 0 < length <= min(_HEADER_MAX, size - 8):
        return None
    try:
        header = json.loads(stream.read(length))
        offsets = [tuple(entry["data_offsets"]) for key, entry in sorted(header.items()) if key != "__metadata__"]
        spans = [(8 + length + int(start), 8 + length + int(stop)) for start, stop in offsets]
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if any(not 8 + length <= start <= stop <= size for start, stop in spans):
        return None
    return 8 + length, spans


def _samples(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """``count`` samples spread evenly over [start, stop), the first and the last bytes among them."""
    if stop - start <= count * SAMPLE_BYTES:
        return [(start, stop - start)] if stop > start else []
    step = (stop - start - SAMPLE_BYTES) / (count - 1)
    return [(start + int(i * step), SAMPLE_BYTES) for i in range(count)]


def _feed(digest: hashlib._Hash, stream: BinaryIO, start: int, length: int) -> None:
    stream.seek(start)
    while length > 0:
        block = stream.read(min(length, 1 << 20))
        if not block:
            raise OSError(f"{stream.name} ended {length} bytes early")
        digest.update(block)
        length -= len(block)
