"""Every kernel compiles for the GPUs it is for, where there is none: as wide accesses as it may, no local memory, no spills."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource

from maru_sglang.kernels import tables
from maru_sglang.kernels.gather import gather_kernel
from maru_sglang.kernels.runs import LANES, NUM_WARPS
from maru_sglang.kernels.scatter import scatter_kernel

KERNELS = {"gather": gather_kernel, "scatter": scatter_kernel}
NARROW = (8, 4, 2, 1)
#: All that a launch can ask for: one width for all, or 16 bytes for the chunks that allow it.
WIDTHS = [(16, 16), *((16, narrow) for narrow in NARROW), *((narrow, narrow) for narrow in NARROW)]
SPANS = (tables.SPAN_MIN, 4096, tables.TILE_BYTES)
#: The rest of the combinations differ from these in nothing that a compiler sees.
CASES = [
    *((widths, 4096) for widths in WIDTHS),
    *((widths, span) for widths in ((16, 16), (1, 1)) for span in (SPANS[0], SPANS[2])),
]
ARGUMENTS = {
    "batch": "*i64", "table": "*i64", "pages": "i64", "pitch": "i64", "first": "i64", "chunks": "i64",
}  # fmt: skip
CONSTANTS = ("WIDE", "NARROW", "SPAN", "ITEMS", "LANES")
#: How the access of a few bytes is written in PTX.
ACCESS = {16: r"\.(v2\.b64|v4\.b32|b128)", 8: r"\.b64", 4: r"\.b32", 2: r"\.b16", 1: r"\.b8"}


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Compiled anew, and away from the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def compiled(kernel: str, arch: int, widths: tuple[int, int], span: int) -> Any:
    values = (*widths, span, tables.TILE_BYTES // span, LANES)
    source = ASTSource(
        KERNELS[kernel], ARGUMENTS | dict.fromkeys(CONSTANTS, "constexpr"), dict(zip(CONSTANTS, values, strict=True))
    )
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": NUM_WARPS, "num_stages": 1})


def accesses(ptx: str, kind: str) -> list[str]:
    """The copies' loads or stores. Tables are read with plain loads."""
    found = re.findall(rf"\b{kind}\.global\S*", ptx)
    return [access for access in found if kind == "st" or ".cg" in access]


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("kernel", KERNELS)
def test_compiles(kernel: str, arch: int, tmp_path: Path) -> None:
    tool = Path(nvidia.get_ptxas().path).with_name("cuobjdump")
    for widths, span in CASES:
        what = f"{kernel} for sm_{arch}, accesses of {widths} bytes, span {span}"
        result = compiled(kernel, arch, widths, span)
        ptx = result.asm["ptx"]
        assert re.search(rf"\.target sm_{arch}a?\b", ptx), what
        assert ".local" not in ptx, f"{what}: local memory"
        for kind in ("ld", "st"):
            found = accesses(ptx, kind)
            assert found, f"{what}: no {kind}"
            for width in set(widths):
                fitting = [access for access in found if re.search(ACCESS[width] + "$", access)]
                assert fitting, f"{what}: no {kind} of {width} bytes among {found}"
                # All accesses of the one tile are of this width: none was cut up.
                if widths == (width, width):
                    assert len(fitting) == len(found), f"{what}: {sorted(set(found))}"
            if widths == (16, 16):
                assert len(found) == tables.TILE_BYTES // (16 * 32 * NUM_WARPS), f"{what}: {len(found)} {kind}"
        binary = tmp_path / "kernel.cubin"
        binary.write_bytes(result.asm["cubin"])
        usage = subprocess.run(
            [tool, "--dump-resource-usage", binary], capture_output=True, text=True, check=True
        ).stdout
        stack, local = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("STACK", "LOCAL"))
        assert (stack, local) == (0, 0), f"{what}: {usage}"
        assert result.metadata.shared == 0, f"{what}: {result.metadata.shared} bytes of shared memory"


def test_all_reads_of_a_wide_tile_come_before_its_writes() -> None:
    """So that as many are under way at once as there are."""
    ptx = compiled("scatter", 90, (16, 16), 4096).asm["ptx"]
    kinds = re.findall(r"\b(ld|st)\.global\S*\.v2\.b64", ptx)
    assert kinds == ["ld"] * (len(kinds) // 2) + ["st"] * (len(kinds) // 2)
