"""The engine kit: its stand-ins do what the real things do, and keep out of the way where those are there."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_support import make_mha, make_mla, page_bytes

pytestmark = pytest.mark.sglang

PAGE = 4
#: Every layout with the I/O backends that SGLang has for it.
WAYS = [
    ("mha", "layer_first", "kernel"), ("mha", "layer_first", "direct"), ("mha", "page_first", "kernel"),
    ("mha", "page_first_direct", "direct"), ("mha", "page_head", "kernel"),
    ("mla", "layer_first", "kernel"), ("mla", "layer_first", "direct"), ("mla", "page_first", "kernel"),
    ("mla", "page_first_direct", "direct"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def only_without_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("the engine kit is inactive: this machine has a GPU")


@pytest.fixture
def transfers() -> Iterator[None]:
    from maru_engine_kit.plugin import provide_stream_synchronize, provide_transfers

    provide_transfers()
    provide_stream_synchronize()
    return None


def device_buffers(pool: Any) -> list[Any]:
    if hasattr(pool, "device_k_buffers"):
        return [*pool.device_k_buffers, *pool.device_v_buffers]
    return list(pool.device_kv_buffers)


@pytest.mark.usefixtures("transfers")
@pytest.mark.parametrize(("kind", "layout", "io"), WAYS)
def test_kv_goes_to_the_host_and_comes_back(kind: str, layout: str, io: str) -> None:
    """Device to host, all layers; host to other device rows, layer by layer; then the rows are equal and no others."""
    import torch

    pool = (make_mha if kind == "mha" else make_mla)(layout, page=PAGE, tokens=64)
    buffers = device_buffers(pool)
    for number, buffer in enumerate(buffers):
        generator = torch.Generator().manual_seed(number)
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    before = [buffer.clone() for buffer in buffers]
    source, host, target = (
        torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])
        for pages in ([3, 0, 7], [9, 2, 4], [12, 13, 1])
    )
    pool.backup_from_device_all_layer(None, host, source, io)
    for layer in range(pool.layer_num):
        pool.load_to_device_per_layer(None, host, target, layer, io)
    others = [row for row in range(64) if row not in set(target.tolist())]
    for old, new in zip(before, buffers, strict=True):
        assert torch.equal(new[target], old[source])
        assert torch.equal(new[others], old[others])
    assert len({page_bytes(pool, page) for page in (9, 2, 4)}) == 3
    assert page_bytes(pool, 5) == bytes(len(page_bytes(pool, 5))), "a page that was not asked for was written"


@pytest.mark.parametrize("kind", ["I", "q", "Q"])
def test_page_hashes_are_those_of_sglang(kind: str) -> None:
    from sglang.srt.mem_cache.cpp_utils import native_hash

    from maru_engine_kit.prepare import PageHash, lacking_for_extension

    if lacking_for_extension():
        pytest.skip(f"SGLang's own page hash cannot be compiled here: {lacking_for_extension()}")
    compiled, plain = native_hash._load_native_hash_module(), PageHash()
    choose = random.Random(0)
    widest = 1 << (31 if kind == "I" else 40)
    tokens = array(kind, [choose.randrange(choose.choice([50_000, widest])) for _ in range(76)])
    for length, width, prior, size in itertools.product(
        (0, 1, 37), (1, 2), (None, bytes(range(32))), (None, 1, 16, 64)
    ):
        same = (tokens, length, width, False, prior, size)
        assert compiled.get_hash(*same) == plain.get_hash(*same)
        pairs = (tokens, length, 2, True, prior, size)
        assert compiled.get_hash(*pairs) == plain.get_hash(*pairs)


def run(code: str, *path: Path) -> str:
    search = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": os.pathsep.join(search)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_stand_in_is_found_and_a_real_one_wins(tmp_path: Path) -> None:
    where = "import sgl_kernel; print(sgl_kernel.__file__)"
    assert "maru_engine_kit" in run(where)
    real = tmp_path / "sgl_kernel" / "__init__.py"
    real.parent.mkdir()
    real.write_text("")
    assert run(where, tmp_path) == str(real)


def test_nothing_is_replaced_where_there_is_an_accelerator() -> None:
    code = """
import torch
torch.cuda.is_available = lambda: True
from maru_engine_kit import plugin
plugin.register()
import importlib.util, sys
print(importlib.util.find_spec("sgl_kernel"), "sglang" in sys.modules, hasattr(torch.cpu.Stream, "synchronize"))
"""
    assert run(code) == "None False False"


def test_what_is_not_supplied_says_so() -> None:
    code = """
import sgl_kernel
try:
    sgl_kernel.verify_tree_greedy_cpu()
except NotImplementedError as error:
    print(error)
"""
    said = run(code)
    assert "verify_tree_greedy_cpu" in said
    assert "install the real sgl-kernel" in said


def test_request_rows_are_written_like_sglang_expects() -> None:
    import torch

    from maru_engine_kit.stand_in.sgl_kernel import assign_req_to_token_pool_cpu

    table = torch.zeros(4, 10, dtype=torch.int32)
    locations = torch.arange(100, 107)
    assign_req_to_token_pool_cpu(torch.tensor([2, 0]), table, torch.tensor([1, 4]), torch.tensor([4, 8]), locations, 10)
    assert table[2].tolist() == [0, 100, 101, 102, 0, 0, 0, 0, 0, 0]
    assert table[0].tolist() == [0, 0, 0, 0, 103, 104, 105, 106, 0, 0]
    assert not table[[1, 3]].any()


def test_models_come_from_their_seed_alone(tmp_path: Path) -> None:
    from maru_engine_kit.models import make_llama

    first, again, other = (make_llama(tmp_path / name, seed=seed) for name, seed in (("a", 3), ("b", 3), ("c", 4)))
    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, again, other)]
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]
    changed = (first / "model.safetensors").stat().st_mtime_ns
    assert make_llama(first, seed=3) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == changed
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(FileExistsError, match="was not made by this tool"):
        make_llama(tmp_path / "mine")
    with pytest.raises(ValueError, match="demo"):
        make_llama(tmp_path / "d", size="huge")


def test_a_tiny_model_answers_differently_to_different_prompts(tmp_path: Path) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    from maru_engine_kit.models import make_llama

    folder = make_llama(tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Maru: Aé 漢字\n"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    prompts = torch.randint(10, 250, (16, 40), generator=torch.Generator().manual_seed(0))
    prompts[8:, 1:] = prompts[:8, 1:]  # the same but for the very first token
    with torch.no_grad():
        logits = model(prompts).logits[:, -1].float()
    assert len(set(logits.argmax(-1).tolist())) >= 6
    gap = (logits[:8].log_softmax(-1) - logits[8:].log_softmax(-1)).abs().amax(-1)
    assert bool((gap > 0.05).all()), "the last token must depend on the first"


def test_states_go_to_the_host_and_come_back() -> None:
    """All layers to the host, layer by layer to other slots; then those are equal and no others."""
    import torch
    from side_pool_support import make_mamba

    from maru_engine_kit.plugin import provide_transfers

    provide_transfers()
    for layout, io in (("page_first", "kernel"), ("page_first_direct", "direct")):
        pool = make_mamba(layout)
        device = [*pool.temporal_device_layers, *[layer for layers in pool.conv_device_layers for layer in layers]]
        for number, layer in enumerate(device):
            layer.copy_(torch.randn(layer.shape, generator=torch.Generator().manual_seed(number)))
        before = [layer.clone() for layer in device]
        source, host, target = torch.tensor([3, 9]), torch.tensor([7, 1]), torch.tensor([5, 12])
        pool.backup_from_device_all_layer(None, host, source, io)
        for layer in range(pool.num_mamba_layers):
            pool.load_to_device_per_layer(None, host, target, layer, io)
        for layer, old in zip(device, before, strict=True):
            assert torch.equal(layer[target], old[source])
            rest = [slot for slot in range(len(layer)) if slot not in (5, 12)]
            assert torch.equal(layer[rest], old[rest])


def test_the_convolution_is_causal_and_its_state_is_the_last_inputs() -> None:
    import torch

    from maru_engine_kit.convolution import causal_conv1d_fn, causal_conv1d_update

    draw = torch.Generator().manual_seed(1)
    channels, width = 5, 3
    weight, bias = torch.randn(channels, width, generator=draw), torch.randn(channels, generator=draw)
    sequences = [torch.randn(channels, length, generator=draw) for length in (7, 4)]
    whole = [
        torch.nn.functional.silu(
            torch.nn.functional.conv1d(
                torch.nn.functional.pad(inputs, (width - 1, 0))[None], weight[:, None], bias, groups=channels
            )[0]
        )
        for inputs in sequences
    ]
    states = torch.full((6, channels, width - 1), 9.0)
    slots = torch.tensor([4, 2], dtype=torch.int32)

    def prefill(parts: list[Any], resumed: bool) -> Any:
        bounds = torch.tensor([0, *itertools.accumulate(part.shape[1] for part in parts)], dtype=torch.int32)
        return causal_conv1d_fn(
            torch.cat(parts, dim=1), weight, bias, query_start_loc=bounds, cache_indices=slots, conv_states=states,
            has_initial_state=torch.tensor([resumed] * 2),
        )  # fmt: skip

    first = prefill([inputs[:, :2] for inputs in sequences], False)
    then = prefill([inputs[:, 2:-1] for inputs in sequences], True)
    last = causal_conv1d_update(
        torch.stack([inputs[:, -1] for inputs in sequences]), states, weight, bias, "silu", conv_state_indices=slots
    )
    position = 0
    for number, (inputs, right) in enumerate(zip(sequences, whole, strict=True)):
        length = inputs.shape[1] - 3
        mine = torch.cat(
            [first[:, 2 * number : 2 * number + 2], then[:, position : position + length], last[number][:, None]], dim=1
        )
        assert torch.allclose(mine, right, atol=1e-5)
        assert torch.equal(states[slots[number]], inputs[:, -2:])
        position += length
    assert bool((states[[0, 1, 3, 5]] == 9).all()), "no other request's state"


def test_tiny_models_of_other_shapes_come_from_their_seed_alone(tmp_path: Path) -> None:
    from maru_engine_kit.models import make_shape
    from maru_engine_kit.shapes import SHAPES

    for shape in SHAPES:
        first, again, other = (
            make_shape(tmp_path / shape / name, shape, seed=seed) for name, seed in (("a", 3), ("b", 3), ("c", 4))
        )
        weights = [(folder / "model.safetensors").read_bytes() for folder in (first, again, other)]
        assert weights[0] == weights[1]
        assert weights[0] != weights[2]
    with pytest.raises(ValueError, match="compressed"):
        make_shape(tmp_path / "d", "round")


def test_host_pools_may_take_what_a_small_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.pool_host import base

    from maru_engine_kit import plugin

    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 10 << 30)
    monkeypatch.setattr(base, "available_host_memory_bytes", lambda **_: 3 << 30)
    assert base.host_memory_budget_bytes(1) < 0
    plugin.leave_less_memory()
    assert base.host_memory_budget_bytes(1) == 1 << 30


@pytest.mark.parametrize("shared_heads", [1, 2])
def test_new_rows_are_what_the_whole_prompt_gives(shared_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several prompts in one batch: with and without a prefix, one longer than a block of rows, tokens anywhere in the cache."""
    import torch
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from maru_engine_kit import attention

    monkeypatch.setattr(attention, "BLOCK", 5)
    generator = torch.Generator().manual_seed(1)
    heads, size, room = 4, 8, 200
    prefixes, news = [24, 0, 7, 1], [13, 6, 1, 5]
    keys, values = (torch.randn(room, heads // shared_heads, size, generator=generator) for _ in range(2))
    order = torch.randperm(room, generator=generator)
    to_token = torch.zeros(6, 64, dtype=torch.long)
    rows = torch.tensor([4, 0, 2, 5])
    for row, prefix, new in zip(rows.tolist(), prefixes, news, strict=True):
        to_token[row, : prefix + new], order = order[: prefix + new], order[prefix + new :]
    query = torch.randn(sum(news), heads, size, generator=generator)
    lengths = [torch.tensor(x) for x in ([p + n for p, n in zip(prefixes, news, strict=True)], prefixes, news)]
    options = {
        "scaling": 0.3,
        "enable_gqa": shared_heads > 1,
        "causal": True,
        "is_cross_attn": False,
        "sliding_window_size": None,
    }
    backend = TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)
    original = TorchNativeAttnBackend._run_sdpa_forward_extend
    # The plugin's hooks may be around it here, too: what is below them is meant.
    original = getattr(original, "__wrapped__", original)
    expected = original(
        backend, query, torch.zeros_like(query), keys, values, to_token, rows, *lengths, None, **options
    )

    seen: list[tuple[int, int]] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(q: Any, k: Any, v: Any, **kwargs: Any) -> Any:
        seen.append((q.shape[-2], k.shape[-2]))
        return attend(q, k, v, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    output = torch.zeros_like(query)
    attention.extend_new_rows(original, backend, query, output, keys, values, to_token, rows, *lengths, None, **options)
    torch.testing.assert_close(output, expected)
    assert sum(q for q, _ in seen) == sum(news), "only new rows"
    assert seen[:3] == [(5, 29), (5, 34), (3, 37)]


@pytest.mark.parametrize(
    "changes",
    [
        {"causal": False},
        {"is_cross_attn": True},
        {"sliding_window_size": 4},
        {"prefixes": [0, 0]},
        {"encoder_lens": [1, 1]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_is_no_prefix_of_causal_attention_is_left_alone(changes: dict[str, Any]) -> None:
    import torch

    from maru_engine_kit.attention import extend_new_rows

    prefixes, encoder = torch.tensor(changes.pop("prefixes", [3, 0])), changes.pop("encoder_lens", None)
    options = {"causal": True, "is_cross_attn": False, "sliding_window_size": None, **changes}
    given = ("query", "output", "k", "v", "tokens", "rows", "lengths", prefixes, "new", encoder)
    asked: list[Any] = []

    def original(*arguments: Any, **kwargs: Any) -> str:
        asked.extend([arguments, kwargs])
        return "its answer"

    assert extend_new_rows(original, "self", *given, **options) == "its answer"
    assert asked == [("self", *given), options]


def test_only_who_asks_for_it_gets_new_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from maru_engine_kit.attention import ENVIRONMENT, is_wanted

    for value, wanted in ((None, False), ("", False), ("0", False), ("1", True)):
        monkeypatch.delenv(ENVIRONMENT, raising=False) if value is None else monkeypatch.setenv(ENVIRONMENT, value)
        assert is_wanted() is wanted
