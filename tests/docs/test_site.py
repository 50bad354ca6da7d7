"""The documentation is a whole site, without a warning; its tables are what the code says."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from maru_core import protocol
from maru_core.pool import format as pool_format

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "tools" / "docs_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["docs_site"] = module
    spec.loader.exec_module(module)
    return module


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(ROOT / "tools" / "docs.sh"), str(tmp_path / "site")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.relative_to(tmp_path / "site").parent.as_posix() for path in (tmp_path / "site").rglob("index.html")}
    assert pages >= {"quickstart", "sglang", "vllm", "rdma", "operation", "security", "performance", "experiments"}
    assert pages >= {"design", "protocol", "pool-format", "testing", "contributing", "examples"}
    first = (tmp_path / "site" / "index.html").read_text()
    assert "one LLM server use the KV cache that another one beside it has already computed" in first
    assert (tmp_path / "site" / "images" / "overview.svg").exists()
    assert (tmp_path / "site" / "files" / "deploy" / "kubernetes" / "pod.yaml").exists()
    for page in (tmp_path / "site").rglob("*.html"):
        assert "<!-- table:" not in page.read_text(), page


def test_the_protocols_page_has_every_message_and_field(hooks: ModuleType) -> None:
    text = hooks.with_tables((ROOT / "docs" / "protocol.md").read_text())
    for kind in (*protocol.Request.__args__, *protocol.Reply.__args__, protocol.Want, protocol.Hold):
        section = re.search(rf"^### {kind.__name__}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
        assert section is not None, kind
        fields = re.findall(r"^\| `(\w+)` \|", section[1], re.MULTILINE)
        assert fields == [field.name for field in msgspec.structs.fields(kind)]
    for kind in (protocol.ErrorCode, protocol.ReserveStatus, protocol.CommitStatus, protocol.MissReason, protocol.Rule):
        for member in kind:
            assert re.search(rf"^\| `{re.escape(str(member.value))}` \| `{member.name}` \| \S", text, re.MULTILINE), (
                member
            )
    assert f"| `MAX_BATCH` | `{protocol.MAX_BATCH}` | Most pages in one message" in text
    assert "32 random bytes" not in text
    assert "16 random bytes, one per client object" in text, "comments beside fields"
    assert "Register a client process." in text, "docstrings"


def test_the_formats_page_has_every_field_where_it_is(hooks: ModuleType) -> None:
    text = hooks.with_tables((ROOT / "docs" / "pool-format.md").read_text())
    for name in ("SUPERBLOCK", "OWNER", "COMPONENT", "NAMESPACE", "RECORD"):
        kind = getattr(pool_format, name)
        for field in kind.names:
            dtype, offset = kind.fields[field][:2]
            told = f"u{8 * dtype.itemsize}" if dtype.kind == "u" else f"{dtype.itemsize} bytes"
            assert f"| {offset} | `{field}` | {told}" in text, (name, field)
    assert "| `FORMAT_VERSION` |" in text
    layout = (ROOT / "docs" / "pool-format.md").read_text()
    for name in pool_format.SUPERBLOCK.names:
        if name.startswith("off_"):
            assert f"| `{name}` |" in layout, "the order of a pool's parts is told"


def test_a_table_that_there_is_not_is_an_error(hooks: ModuleType) -> None:
    with pytest.raises(KeyError, match="no such"):
        hooks.with_tables("<!-- table: no such -->")


def test_links_lead_to_the_same_thing_in_the_site(hooks: ModuleType) -> None:
    text = "[a](docs/sglang.md#x) ![b](docs/images/demo.png) [c](LICENSE) [d](https://x/docs/y.md) `[e](docs/z.md)` [f](#here)"
    assert hooks.rewritten(text, "README.md") == (
        "[a](sglang.md#x) ![b](images/demo.png) [c](files/LICENSE) [d](https://x/docs/y.md) `[e](docs/z.md)` [f](#here)"
    )
    assert hooks.rewritten("[a](../README.md#settings) [b](../deploy/systemd/x)", "docs/vllm.md") == (
        "[a](index.md#settings) [b](files/deploy/systemd/x)"
    )


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_links_lead_somewhere_in_the_checkout(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert (ROOT / "docs").joinpath(target).exists(), target
