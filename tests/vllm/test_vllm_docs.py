"""docs/vllm.md names what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from maru_core.store_config import StoreMetrics

DOCS = Path(__file__).parents[2] / "docs" / "vllm.md"
TEXT = DOCS.read_text()


def row_of(metric: str) -> str:
    """The line of the table that describes a metric."""
    (row,) = [line for line in TEXT.splitlines() if line.startswith("|") and f"`{metric}" in line]
    return row


@pytest.mark.vllm
def test_every_metric_is_described_and_no_other() -> None:
    from maru_vllm.metrics import metric_names

    named = set(re.findall(r"vllm:maru_[a-z_]+", TEXT))
    assert {name.removesuffix("_total") for name in named} == set(metric_names())


@pytest.mark.parametrize(
    ("metric", "start"), [("missed", "lookup_"), ("failed_load", "miss_"), ("not_stored", "refused_")]
)
def test_every_reason_is_described(metric: str, start: str) -> None:
    row = row_of(f"vllm:maru_{metric}_blocks_total")
    told = set(re.findall(r"`([a-z_]+)`", row.split("|", 3)[3]))
    extra = {"dropped"} if start == "refused_" else set()  # counted by the connector itself
    assert (
        told == {name.removeprefix(start) for name in StoreMetrics.__struct_fields__ if name.startswith(start)} | extra
    )


@pytest.mark.vllm
def test_the_hash_algorithms_and_formats_are_vllms() -> None:
    from typing import get_args

    from vllm.config.cache import PrefixCachingHashAlgo

    for name in get_args(PrefixCachingHashAlgo):
        assert f"`{name}`" in TEXT


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXT)
    assert links
    for link in links:
        assert (DOCS.parent / link).exists(), link


def test_the_readme_leads_here() -> None:
    assert "docs/vllm.md" in (DOCS.parent.parent / "README.md").read_text()
