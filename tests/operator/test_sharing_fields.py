"""``maru doctor`` says for every field of a namespace, and for every part of the fields that have several, what keeps two
engines of one model apart."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from maru_core.namespace import Namespace
from maru_server.operator import checks_sharing
from maru_server.operator.findings import OK, WARN

WEIGHTS = "weights=1111 config=2222 dtype=bfloat16 quantization=none kv_scales=none args=3333"
LAYOUT = "page_first/nhd/MHATokenToKVPoolHost swa=MHATokenToKVPoolHost/page_first/bfloat16/p16/4096B/2l/kv2x16"
BASE = Namespace(
    engine="sglang 0.5.23", hash_scheme="sglang-sha256 abcd", model="ToyForCausalLM", weights=WEIGHTS, adapter="seed-of-chain",
    kv_dtype="fp8_e4m3", page_tokens=16, layers="0:4", heads="kv2x16", layout=LAYOUT, tensor_parallel=2, pipeline_parallel=1,
    context_parallel=1, data_parallel=1, draft="", tag="",
)  # fmt: skip

#: What changes, and the words that must be told.
CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"engine": "sglang 0.5.24"}, "engine: 0.5.23 / 0.5.24"),
    ({"hash_scheme": "sglang-sha256 ffff"}, "hash_scheme: abcd / ffff"),
    ({"model": "OtherForCausalLM"}, "model: ToyForCausalLM / OtherForCausalLM"),
    ({"weights": WEIGHTS.replace("weights=1111", "weights=9999")}, "weights: weights=1111 / weights=9999"),
    ({"weights": WEIGHTS.replace("config=2222", "config=8888")}, "config=2222 / config=8888"),
    ({"weights": WEIGHTS.replace("dtype=bfloat16", "dtype=float16")}, "dtype=bfloat16 / dtype=float16"),
    ({"weights": WEIGHTS.replace("quantization=none", "quantization=fp8")}, "quantization=none / quantization=fp8"),
    ({"weights": WEIGHTS.replace("kv_scales=none", "kv_scales=7777")}, "kv_scales=none / kv_scales=7777"),
    ({"weights": WEIGHTS.replace("args=3333", "args=6666")}, "args=3333 / args=6666"),
    ({"adapter": "seed-of-chain lora=5555"}, "adapter: (nothing) / lora=5555"),
    ({"kv_dtype": "fp8_e5m2"}, "kv_dtype: fp8_e4m3 / fp8_e5m2"),
    ({"page_tokens": 64}, "page_tokens: 16 / 64"),
    ({"layers": "0:2,2:4"}, "layers: 0:4 / 0:2,2:4"),
    ({"heads": "kv4x16"}, "heads: kv2x16 / kv4x16"),
    ({"layout": LAYOUT.replace("page_first/nhd", "page_head/nhd")}, "page_first/nhd/MHATokenToKVPoolHost / page_head/nhd"),
    ({"layout": LAYOUT.replace("2l", "3l")}, "16/4096B/3l/kv2x16"),
    ({"layout": LAYOUT.split(" ")[0]}, "swa=MHATokenToKVPoolHost/page_first/bfloat16/p16/4096B/2l/kv2x16 / (nothing)"),
    ({"tensor_parallel": 4}, "tensor_parallel: 2 / 4"),
    ({"pipeline_parallel": 2}, "pipeline_parallel: 1 / 2"),
    ({"context_parallel": 2}, "context_parallel: 1 / 2"),
    ({"data_parallel": 2}, "data_parallel: 1 / 2"),
    ({"draft": "EAGLE 4444"}, "draft: (nothing) / 'EAGLE 4444'"),
]  # fmt: skip


def row(number: int, namespace: Namespace, pages: int = 0) -> dict[str, Any]:
    return {
        "namespace": number, "tenant": "", "record": msgspec.to_builtins(namespace), "pages": pages, "counts": {"matches": pages},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"), CHANGES, ids=lambda value: next(iter(value)) if isinstance(value, dict) else ""
)
def test_what_keeps_two_engines_apart_is_told(change: dict[str, Any], words: str) -> None:
    other = msgspec.structs.replace(BASE, **change)
    assert other.digest() != BASE.digest()
    (finding,) = checks_sharing.check_namespaces([row(0, BASE), row(1, other)])
    assert finding.level == WARN
    assert words in finding.text


def test_every_field_is_among_the_changes() -> None:
    assert {next(iter(change)) for change, _ in CHANGES} == {*Namespace.__struct_fields__} - {"tag"}
    (finding,) = checks_sharing.check_namespaces([row(0, BASE), row(1, msgspec.structs.replace(BASE, tag="blue"))])
    assert finding.level == OK, "a tag keeps engines apart on purpose"


def test_what_an_engine_opens_before_its_draft_model_is_there_is_no_finding() -> None:
    before = msgspec.structs.replace(BASE, draft="EAGLE 4444")
    after = msgspec.structs.replace(
        before, layout=f"{LAYOUT} draft=MHATokenToKVPoolHost/page_first/bfloat16/p16/512B/1l/kv2x16"
    )
    for rows in ([row(0, before), row(1, after)], [row(0, after, 5), row(1, before)]):
        assert [finding.level for finding in checks_sharing.check_namespaces(rows)] == [OK]
    (used,) = checks_sharing.check_namespaces([row(0, before, 5), row(1, after)])
    assert used.level == WARN, "another engine, without that pool"
