"""Pool URIs: every accepted form, every refusal with key, value and cure, and the round trip."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maru_core.errors import ConfigError
from maru_core.pool import PoolURI, format_size, parse_pool_uri, parse_size


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("shm://maru", PoolURI("shm", Path("/dev/shm/maru"))),
        ("shm://maru?size=8G", PoolURI("shm", Path("/dev/shm/maru"), size=8 << 30)),
        ("file:///mnt/pmem0/pool", PoolURI("file", Path("/mnt/pmem0/pool"))),
        ("file:///mnt/a%20b%23%3F/pool?mode=640", PoolURI("file", Path("/mnt/a b#?/pool"), mode=0o640)),
        ("shm://maru?numa=0", PoolURI("shm", Path("/dev/shm/maru"), numa=0)),
        ("file:///mnt/tmp/pool?size=1G&numa=1023", PoolURI("file", Path("/mnt/tmp/pool"), 1 << 30, numa=1023)),
        ("file:////twice", PoolURI("file", Path("/twice"))),
        ("dax:///dev/dax0.0", PoolURI("dax", Path("/dev/dax0.0"))),
        (
            "dax:///dev/dax0.0?coherence=software&extent=1G&min_slot=64K&align=1G",
            PoolURI("dax", Path("/dev/dax0.0"), coherence="software", extent=1 << 30, min_slot=64 << 10, align=1 << 30),
        ),
    ],
)
def test_parses(text: str, uri: PoolURI) -> None:
    assert parse_pool_uri(text) == uri
    assert parse_pool_uri(str(uri)) == uri


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("maru", ["''", "shm://"]),
        ("http://host/pool", ["http", "shm://"]),
        ("shm://", ["shared-memory name"]),
        ("shm://a/b", ["a/b", "shared-memory name"]),
        ("shm://..", ["..", "shared-memory name"]),
        ("shm://.hidden", [".hidden"]),
        ("shm://user@host:1", ["user@host:1"]),
        ("file://relative/path", ["relative/path", "three slashes"]),
        ("file:///", ["absolute file path"]),
        ("file:///a/", ["/a/"]),
        ("file:///a%00b", ["absolute file path"]),
        ("file:///a\nb", ["control characters"]),
        ("file:///a#b", ["%23"]),
        ("file://[/x", ["not a URI"]),
        ("shm://a?size", ["size", "key=value"]),
        ("shm://a?size=8G&size=9G", ["twice"]),
        ("shm://a?sise=8G", ["sise", "8G", "size"]),
        ("shm://a?size=", ["size=''", "8G"]),
        ("shm://a?size=0", ["size='0'"]),
        ("shm://a?size=-1G", ["size='-1G'"]),
        ("shm://a?size=1.5G", ["size='1.5G'"]),
        ("shm://a?size=8X", ["size='8X'"]),
        ("shm://a?size=99999999T", ["size='99999999T'"]),
        ("shm://a?size=%D9%A1", ["size="]),
        ("shm://a?coherence=none", ["coherence='none'", "hardware"]),
        ("shm://a?mode=666", ["mode='666'", "600"]),
        ("shm://a?align=3M", ["align=3M", "power of two"]),
        ("shm://a?align=512", ["align=512", "4K"]),
        ("shm://a?min_slot=1000", ["min_slot=1000", "4K"]),
        ("shm://a?extent=1000", ["extent=1000", "4K"]),
        *(
            (f"shm://a?numa={bad}", [f"numa='{bad}'", "numactl"])
            for bad in ("", "-1", "1.0", "0-1", "x", "1024", "٣", "00001")
        ),
        ("dax:///dev/dax0.0?numa=1", ["numa=1", "dax device", "leave numa out"]),
    ],
)
def test_refuses_and_says_why(text: str, named: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_pool_uri(text)
    assert all(part in str(error.value) for part in named), str(error.value)


def test_sizes() -> None:
    assert [parse_size(t) for t in ("4096", "4k", "4KB", "4KiB", " 4 KiB ", "1T")] == [4096] * 5 + [1 << 40]
    assert [format_size(n) for n in (1, 4096, 4097, 3 << 29, 8 << 30)] == ["1", "4K", "4097", "1536M", "8G"]


sizes = st.none() | st.integers(1, (1 << 63) - 1)
pages = st.none() | st.integers(1, 1 << 40).map(lambda n: n * 4096)
names = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=20)


@given(
    place=st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,20}", fullmatch=True).map(lambda n: ("shm", "/dev/shm/" + n))
    | st.tuples(
        st.sampled_from(["file", "dax"]), st.lists(names, min_size=1, max_size=3).map(lambda p: "/" + "/".join(p))
    ),
    size=sizes,
    extent=pages,
    min_slot=pages,
    align=st.none() | st.integers(12, 40).map(lambda n: 1 << n),
    coherence=st.sampled_from(["hardware", "software"]),
    mode=st.sampled_from([0o600, 0o640, 0o660]),
    numa=st.none() | st.integers(0, 1023),
)
def test_round_trip(place, size, extent, min_slot, align, coherence, mode, numa) -> None:
    path = Path(place[1])
    if str(path) == "/" or str(path).startswith("//") or path.name == "":
        return
    numa = None if place[0] == "dax" else numa
    uri = PoolURI(place[0], path, size, coherence, extent, min_slot, align, mode, numa)
    assert parse_pool_uri(str(uri)) == uri


@given(st.text(max_size=12) | st.integers(-5, 2000).map(str))
def test_whatever_stands_behind_numa_is_a_node_or_refused(text: str) -> None:
    written = "shm://a?numa=" + quote(text)
    if re.fullmatch("[0-9]{1,4}", text) and int(text) < 1024:
        assert parse_pool_uri(written).numa == int(text)
    else:
        with pytest.raises(ConfigError, match="numa="):
            parse_pool_uri(written)
