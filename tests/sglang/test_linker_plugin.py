"""The plugin's part for the direct linker, in the real SGLang: arguments, and what happens where something is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from maru_sglang import plugin, plugin_linker

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("plugins")]

BACKEND = "--unified-cache-external-linker-backend"
CONFIG = "--unified-cache-external-linker-config"


def resolve(model: Path, *words: str) -> Any:
    """Server arguments after SGLang's own parsing and resolution."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import prepare_server_args

    arguments = prepare_server_args(["--model-path", str(model), "--device", "cpu", *words])
    arguments.resolve_once()
    return resolving_view(arguments)


class TestArguments:
    def test_the_backend_alone_is_enough(self, model_dir: Path) -> None:
        view = resolve(model_dir, BACKEND, "maru")
        assert view.unified_cache_external_linker_backend == "maru"
        assert view.enable_unified_cache_external_linker is True
        assert not view.enable_hierarchical_cache

    def test_what_is_published_says_so_too(self, model_dir: Path) -> None:
        """As each scheduler reads it, from its own copy of the arguments."""
        import pickle

        from sglang.srt import runtime_context
        from sglang.srt.server_args import prepare_server_args

        arguments = prepare_server_args(["--model-path", str(model_dir), "--device", "cpu", BACKEND, "maru"])
        arguments.resolve_once()
        copy = pickle.loads(pickle.dumps(arguments))
        with runtime_context.get_context().override_server_args():
            runtime_context.get_context().set_server_args(copy)
            assert runtime_context.get_memory().enable_unified_cache_external_linker is True
            assert runtime_context.get_memory().unified_cache_external_linker_backend == "maru"

    def test_other_backends_are_as_before(self, model_dir: Path) -> None:
        assert resolve(model_dir).enable_unified_cache_external_linker is False
        assert resolve(model_dir, BACKEND, "mori").enable_unified_cache_external_linker is False
        nonsense = '{"sever": 1}'
        assert resolve(model_dir, BACKEND, "mori", CONFIG, nonsense).unified_cache_external_linker_config == {
            "sever": 1
        }

    def test_the_long_form_works_as_well(self, model_dir: Path) -> None:
        words = ("--enable-unified-cache-external-linker", BACKEND, "maru", CONFIG, '{"tag": "a", "log_layers": true}')
        assert resolve(model_dir, *words).enable_unified_cache_external_linker is True

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ('{"sever": "ipc:///x"}', (CONFIG, "'sever'", "'server'")),
            ('{"timeout_ms": 0}', (CONFIG, "timeout_ms", "60000")),
            ('{"log_layers": "yes"}', (CONFIG, "log_layers", "true or false")),
            ('{"prefetch_threshold": 5}', (CONFIG, "'prefetch_threshold'")),
            ("[1]", (CONFIG, "object")),
        ],
    )
    def test_a_bad_config_stops_the_start(self, model_dir: Path, text: str, words: tuple[str, ...]) -> None:
        with pytest.raises(Exception, match=r".") as caught:
            resolve(model_dir, BACKEND, "maru", CONFIG, text)
        assert all(word in str(caught.value) for word in words), str(caught.value)

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("--enable-hierarchical-cache",), "mutually exclusive"),
            (("--disable-radix-cache",), "radix caching enabled"),
            (("--enable-lmcache",), "both want to be the cache|mutually exclusive"),
        ],
    )
    def test_two_caches_are_refused(self, model_dir: Path, words: tuple[str, ...], said: str) -> None:
        with pytest.raises(Exception, match=said):
            resolve(model_dir, BACKEND, "maru", *words)


class Linker:
    def __init__(self) -> None:
        self.told: list[str] = []

    def weights_changed(self) -> None:
        self.told.append("weights")

    def quiesce(self) -> None:
        self.told.append("quiesced")


class TestWeightUpdates:
    @pytest.fixture(autouse=True)
    def restore(self) -> Iterator[None]:
        yield
        plugin._weights_replaced = False

    def updater(self, linker: Linker) -> Any:
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

        made = SchedulerWeightUpdaterManager.__new__(SchedulerWeightUpdaterManager)
        tree = types.SimpleNamespace(cache_controller=None, linker=types.SimpleNamespace(cache_linker=linker))
        made.scheduler = types.SimpleNamespace(tree_cache=tree, _engine_paused=False)
        made.metrics_collector, made._session = None, None
        made.is_fully_idle = lambda **_: False
        weights = types.SimpleNamespace(update_weights_from_disk=lambda *_, **__: (False, "no such model"))
        runners = [("target", types.SimpleNamespace(weight_updater=weights))]
        made.tp_worker, made.draft_worker = types.SimpleNamespace(weight_update_runners=lambda: runners), None
        return made

    def test_the_linker_is_told_first(self) -> None:
        linker = Linker()
        request = types.SimpleNamespace(model_path="x", load_format=None, recapture_cuda_graph=False, flush_cache=False)
        self.updater(linker).update_weights_from_disk(request)
        assert linker.told == ["weights"]

    @pytest.mark.parametrize(
        ("tags", "told"),
        [(None, ["quiesced", "weights"]), (["weights"], ["quiesced", "weights"]), (["kv_cache"], ["quiesced"])],
    )
    def test_memory_is_left_alone_before_it_is_released(self, tags: list[str] | None, told: list[str]) -> None:
        linker = Linker()
        with pytest.raises(AssertionError, match="idle"):  # SGLang itself goes no further than its first check
            self.updater(linker).release_memory_occupation(types.SimpleNamespace(tags=tags))
        assert linker.told == told


START = """
import sys
sys.argv = ["server"]
{before}
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
for words in (["--enable-hierarchical-cache", "--hicache-storage-backend", "maru"], [{backend!r}, "maru"]):
    arguments = prepare_server_args(["--model-path", {model!r}, "--device", "cpu", *words])
    arguments.resolve_once()
    print("STARTED", words[-2], flush=True)
"""


def test_a_missing_seam_of_the_linker_is_named_and_does_not_take_the_storage_backend_along(model_dir: Path) -> None:
    before = (
        "from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinkerWrapper as W\n"
        "del W._offload_node"
    )
    code = START.format(before=before, backend=BACKEND, model=str(model_dir))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1"},
    )
    assert done.stdout.splitlines() == ["STARTED --hicache-storage-backend"], done.stdout + done.stderr[-3000:]
    assert done.returncode != 0
    assert "UnifiedCacheLinkerWrapper._offload_node" in done.stderr
    assert "tested with SGLang 0.5.23" in done.stderr


def test_this_sglang_has_all_seams() -> None:
    assert plugin.missing_seams(plugin_linker.SEAMS) == []
