"""Pages of LoRA adapters: told apart by the adapter's content, and found by every engine that has the same."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from model_files import write_safetensors

from maru_vllm.adapters import ADAPTERS_MAX, Adapters, Keys
from support import await_condition

pytestmark = pytest.mark.vllm


def write_adapter(directory: Path, seed: int) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text('{"r": 8}')
    write_safetensors(directory / "adapter_model.safetensors", {"a": 64}, seed)
    return directory


def request(tokens: Sequence[int], adapter: Path | None = None, number: int = 1, **lora: Any) -> Any:
    """A request of vLLM with its real hashes, 8 tokens a block."""
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    lora_request = LoRARequest("name", number, str(adapter), **lora) if adapter else None
    return Request(
        request_id="r", prompt_token_ids=list(tokens), sampling_params=SamplingParams(max_tokens=64), pooling_params=None,
        lora_request=lora_request, block_hasher=get_request_block_hasher(8, sha256),
    )  # fmt: skip


@pytest.fixture
def adapters() -> Iterator[Adapters]:
    made = Adapters()
    yield made
    made.close()


def keys(adapters: Adapters, made: Any) -> list[bytes]:
    of = Keys(adapters)
    await_condition(lambda: bool(of.of(made)), "the adapter is read")
    return list(of.of(made))


def test_without_an_adapter_keys_are_vllms_hashes(adapters: Adapters) -> None:
    made = request(range(24))
    assert list(Keys(adapters).of(made)) == made.block_hashes
    assert len(made.block_hashes) == 3


def test_one_path_with_other_content_has_other_keys(tmp_path: Path, adapters: Adapters) -> None:
    """As on two machines, or after a training run under the same name."""
    path = write_adapter(tmp_path / "adapter", 1)
    first = keys(adapters, request(range(24), path))
    assert first == keys(Adapters(), request(range(24), path))
    write_adapter(path, 2)
    second = keys(adapters, request(range(24), path, number=2))
    assert (
        request(range(24), path).block_hashes == request(range(24), path, number=2).block_hashes
    )  # vLLM sees no difference
    assert not set(first) & set(second)
    assert all(len(key) == 32 for key in first)


def test_keys_do_not_meet_those_without_an_adapter(tmp_path: Path, adapters: Adapters) -> None:
    made = request(range(24), write_adapter(tmp_path / "adapter", 1))
    assert not set(keys(adapters, made)) & {*made.block_hashes, *request(range(24)).block_hashes}


def test_how_experts_are_stacked_counts(tmp_path: Path, adapters: Adapters) -> None:
    path = write_adapter(tmp_path / "adapter", 1)
    assert keys(adapters, request(range(8), path)) != keys(
        adapters, request(range(8), path, number=2, is_3d_lora_weight=True)
    )


def test_keys_grow_with_the_request_and_follow_its_changes(tmp_path: Path, adapters: Adapters) -> None:
    path = write_adapter(tmp_path / "adapter", 1)
    made, of = request(range(20), path), Keys(adapters)
    await_condition(lambda: bool(of.of(made)), "the adapter is read")
    assert len(of.of(made)) == 2
    made.append_output_token_ids(list(range(100, 120)))
    assert list(of.of(made)) == keys(adapters, made)
    assert len(of.of(made)) == 5
    other = request(range(1, 25), path)
    made.block_hashes[:] = other.block_hashes  # an input that goes on may take back what was generated
    assert list(of.of(made)) == keys(adapters, other)


def test_an_adapter_that_is_not_known_is_served_without(
    tmp_path: Path, adapters: Adapters, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_adapter(tmp_path / "adapter", 1)
    assert Keys(adapters).of(request(range(24), path, load_inplace=True)) == ()
    with caplog.at_level(logging.WARNING, "maru.vllm"):
        gone = request(range(24), tmp_path / "gone")
        assert Keys(adapters).of(gone) == ()
        await_condition(lambda: "give --lora-modules a local directory" in caplog.text, "the reason is logged")
    assert Keys(adapters).of(gone) == ()
    assert caplog.text.count("are served without Maru") == 1


def test_a_request_keeps_its_keys_when_many_adapters_come_by(tmp_path: Path, adapters: Adapters) -> None:
    path = write_adapter(tmp_path / "adapter", 1)
    made, of = request(range(24), path), Keys(adapters)
    await_condition(lambda: bool(of.of(made)), "the adapter is read")
    before = list(of.of(made))
    for number in range(2, ADAPTERS_MAX + 3):
        adapters._digests[number, "name", "path"] = adapters._digests[1, "name", str(path)]
    shutil.rmtree(path)
    assert list(of.of(made)) == before
