"""The plugin inside the real SGLang, without a server: arguments, hooks, and what happens where something is missing.

What needs a clean process runs in one of its own; SGLang's hooks cannot be taken back.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang_support import make_mha, storage_config

from maru_sglang import plugin

ARGUMENTS = ("--model-path", "{model}", "--device", "cpu", "--enable-hierarchical-cache", "--hicache-storage-backend")


@pytest.fixture(scope="module")
def loaded() -> None:
    """All plugins of this environment, loaded as SGLang does at the start of each process."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    assert plugin.missing_seams() == []


def resolve(model: Path, backend: str, *more: str) -> Any:
    """Server arguments after SGLang's own parsing and resolution."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import prepare_server_args

    arguments = prepare_server_args([part.format(model=model) for part in ARGUMENTS] + [backend, *more])
    arguments.resolve_once()
    return resolving_view(arguments)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", **environment},
    )


# ---------------------------------------------------------------- arguments


@pytest.mark.sglang
@pytest.mark.usefixtures("loaded")
class TestArguments:
    def test_the_name_is_accepted_and_kept(self, model_dir: Path) -> None:
        assert resolve(model_dir, "maru").hicache_storage_backend == "maru"

    def test_other_names_are_as_before(self, model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert resolve(model_dir, "file").hicache_storage_backend == "file"
        with pytest.raises(SystemExit):
            resolve(model_dir, "mary")
        assert "invalid choice: 'mary'" in capsys.readouterr().err

    @pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "page_head", "layer_first"])
    def test_the_layout_is_left_alone(self, model_dir: Path, layout: str) -> None:
        found = resolve(model_dir, "maru", "--hicache-mem-layout", layout)
        assert found.hicache_mem_layout == layout

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ('{"sever": "ipc:///x"}', ("'sever'", "'server'")),
            ('{"timeout_ms": 0}', ("timeout_ms", "0", "60000")),
            ('{"hicache_storage_pass_prefix_keys": false}', ("pass_prefix_keys", "False", "leave the key out")),
            ('{"hicache_storage_pass_prefix_keys": 1}', ("pass_prefix_keys", "1")),
            ("[1]", ("list", "object")),
            ("{", ("not JSON",)),
        ],
    )
    def test_a_bad_extra_config_stops_the_start(self, model_dir: Path, text: str, words: tuple[str, ...]) -> None:
        with pytest.raises(Exception, match=r".") as caught:
            resolve(model_dir, "maru", "--hicache-storage-backend-extra-config", text)
        assert all(word in str(caught.value) for word in words), str(caught.value)

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("extra.json", '{"verify": "sometimes"}'),
            ("extra.toml", 'verify = "sometimes"'),
            ("extra.yaml", "verify: sometimes"),
        ],
    )
    def test_config_files_are_checked_too(self, model_dir: Path, tmp_path: Path, name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        with pytest.raises(Exception, match="'sometimes'"):
            resolve(model_dir, "maru", "--hicache-storage-backend-extra-config", f"@{tmp_path / name}")

    def test_sglang_keys_and_other_backends_are_not_checked(self, model_dir: Path) -> None:
        mine = json.dumps({"prefetch_threshold": 32, "hicache_storage_pass_prefix_keys": True, "tag": "a"})
        assert resolve(model_dir, "maru", "--hicache-storage-backend-extra-config", mine) is not None
        theirs = json.dumps({"anything": 1, "hicache_storage_pass_prefix_keys": False})
        assert resolve(model_dir, "file", "--hicache-storage-backend-extra-config", theirs) is not None

    def test_it_needs_the_hierarchical_cache(self, model_dir: Path) -> None:
        from sglang.srt.server_args import prepare_server_args

        line = ["--model-path", str(model_dir), "--device", "cpu", "--hicache-storage-backend", "maru"]
        with pytest.raises(ValueError, match="needs --enable-hierarchical-cache"):
            prepare_server_args(line).resolve_once()

    def test_an_untested_version_is_named_once(self, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        said: list[str] = []

        class Keep(logging.Handler):  # SGLang sets up logging anew and drops pytest's handler
            def emit(self, record: logging.LogRecord) -> None:
                said.append(record.getMessage())

        monkeypatch.setattr(plugin.logger, "handlers", [Keep()])
        resolve(model_dir, "maru")
        monkeypatch.setattr("sglang.version.__version__", "0.9.1")
        resolve(model_dir, "file")
        assert said == []
        resolve(model_dir, "maru")
        (warning,) = said
        assert "0.5.23" in warning
        assert "0.9.1" in warning


# ---------------------------------------------------------------- the backend in place


@pytest.mark.sglang
@pytest.mark.usefixtures("loaded")
class TestHooks:
    def test_the_factory_builds_the_backend(self, publish: Callable[..., Any], server: Any, tmp_path: Path) -> None:
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile
        from sglang.srt.mem_cache.storage import StorageBackendFactory

        from maru_sglang.storage.backend import MaruHiCacheStorage

        publish()
        extra = {"server": server.endpoint}
        backend = StorageBackendFactory.create_backend("maru", storage_config(extra_config=extra), make_mha())
        assert type(backend) is MaruHiCacheStorage
        backend.close()
        config = storage_config(extra_config={"file_storage_path": str(tmp_path)})
        assert type(StorageBackendFactory.create_backend("file", config, make_mha())) is HiCacheFile

    @pytest.mark.parametrize(("backend", "zero_copy"), [("maru", True), ("file", False)])
    def test_pages_move_by_the_zero_copy_calls(
        self, publish: Callable[..., Any], server: Any, tmp_path: Path, backend: str, zero_copy: bool
    ) -> None:
        """The controller's own attach, on a controller that has what that needs."""
        import threading

        from sglang.srt.managers.cache_controller import HiCacheController

        publish()
        extra = {"server": server.endpoint} if backend == "maru" else {"file_storage_path": str(tmp_path)}
        controller = HiCacheController.__new__(HiCacheController)
        pool = make_mha()
        vars(controller).update(
            enable_storage=False, host_memory_mode="cache", storage_host_pool=pool, mem_pool_host=pool, page_size=4,
            storage_stop_event=threading.Event(), prefetch_hits_sync_groups=[], prefetch_completion_sync_groups=[],
            _create_sync_groups=list, _start_storage_threads=lambda: None,
            _generate_storage_config=lambda *_: storage_config(extra_config=extra),
        )  # fmt: skip
        controller.attach_storage_backend(storage_backend=backend)
        assert (controller.page_get_func == controller._page_get_zero_copy) is zero_copy
        assert (controller.page_set_func == controller._page_set_zero_copy) is zero_copy
        controller.detach_storage_backend()
        assert controller.page_get_func == controller._generic_page_get

    @pytest.mark.parametrize(("backend", "given", "used"), [("maru", False, True), ("file", False, False)])
    def test_chains_are_passed(self, backend: str, given: bool, used: bool) -> None:
        from sglang.srt.mem_cache.unified_cache.storage_attachment import StorageAttachment

        cache = types.SimpleNamespace(enable_storage=True, page_size=16)
        StorageAttachment(cache).apply_runtime_config(
            storage_backend=backend, prefetch_threshold=16, prefetch_timeout_base=1.0, prefetch_timeout_per_ki_token=0.25,
            hicache_storage_pass_prefix_keys=given, enable_storage=True, enable_storage_metrics=False,
            extra_metric_labels=None,
        )  # fmt: skip
        assert cache.hicache_storage_pass_prefix_keys is used

    @pytest.mark.parametrize("config", ['{"hicache_storage_pass_prefix_keys": false}', '{"nonsense": 1}'])
    def test_a_bad_attach_is_refused_before_anything_is_touched(self, config: str) -> None:
        from sglang.srt.mem_cache.unified_cache.storage_attachment import StorageAttachment

        attachment = StorageAttachment(types.SimpleNamespace())  # touching it would fail otherwise
        with pytest.raises(Exception, match=r"leave the key out|unknown key 'nonsense'"):
            attachment.attach("maru", storage_backend_extra_config_json=config)
        with pytest.raises(Exception, match=r"leave the key out|unknown key 'nonsense'"):
            attachment.attach(storage_backend="maru", storage_backend_extra_config_json=config)


class Recorder:
    """What a weight update meets: a backend that notes when it was told, and weights that note when they changed."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def weights_changed(self) -> None:
        self.events.append("told")

    def update_weights_from_disk(self, *_: Any, **__: Any) -> tuple[bool, str]:
        self.events.append("changed")
        return False, "no such model"

    def begin_weight_update(self) -> None:
        self.events.append("begun")


@pytest.mark.sglang
@pytest.mark.usefixtures("loaded")
class TestWeightUpdates:
    @pytest.fixture(autouse=True)
    def restore(self) -> Any:
        yield
        plugin._weights_replaced = False

    def updater(self, backend: Any, recorder: Recorder) -> Any:
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

        made = SchedulerWeightUpdaterManager.__new__(SchedulerWeightUpdaterManager)
        controller = types.SimpleNamespace(storage_backend=backend)
        made.scheduler = types.SimpleNamespace(tree_cache=types.SimpleNamespace(cache_controller=controller))
        made.metrics_collector, made._session = None, None
        runners = [("target", types.SimpleNamespace(weight_updater=recorder))]
        made.tp_worker, made.draft_worker = types.SimpleNamespace(weight_update_runners=lambda: runners), None
        return made

    def request(self) -> Any:
        return types.SimpleNamespace(model_path="x", load_format=None, recapture_cuda_graph=False, flush_cache=False)

    @pytest.mark.parametrize("wrapped", [False, True])
    def test_the_backend_is_told_first(self, wrapped: bool) -> None:
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageFailureInjector
        from sglang.srt.mem_cache.unified_cache.storage_attachment import StorageAttachment

        recorder = Recorder()
        backend = HiCacheStorageFailureInjector(recorder, 0.0, 0.0) if wrapped else recorder
        self.updater(backend, recorder).update_weights_from_disk(self.request())
        assert recorder.events == ["told", "changed"]
        with pytest.raises(ValueError, match="replaced at run time"):
            StorageAttachment(types.SimpleNamespace()).attach(storage_backend="maru")

    def test_weights_may_be_written_by_rdma_once_an_update_has_begun(self, monkeypatch: pytest.MonkeyPatch) -> None:
        recorder = Recorder()
        updater = self.updater(recorder, recorder)
        monkeypatch.setattr("torch.distributed.barrier", lambda **_: None)
        updater.tp_cpu_group = None
        assert updater.begin_weight_update(types.SimpleNamespace(selector="target")).success
        assert recorder.events == ["told", "begun"]
        assert plugin._weights_replaced

    @pytest.mark.parametrize(("tags", "told"), [(None, True), (["weights"], True), (["kv_cache"], False)])
    def test_released_weights_are_no_longer_known(self, tags: list[str] | None, told: bool) -> None:
        recorder = Recorder()
        updater = self.updater(recorder, recorder)
        updater.scheduler._engine_paused = False
        updater.is_fully_idle = lambda **_: False  # SGLang itself goes no further than its first check
        with pytest.raises(AssertionError, match="idle"):
            updater.release_memory_occupation(types.SimpleNamespace(tags=tags))
        assert recorder.events == (["told"] if told else [])
        assert plugin._weights_replaced is told

    def test_a_call_that_sglang_refuses_changes_nothing(self) -> None:
        recorder = Recorder()
        updater = self.updater(recorder, recorder)
        assert not updater.update_weights_from_tensor(self.request()).success
        assert not updater.update_weights_from_distributed(self.request()).success
        assert recorder.events == []
        assert not plugin._weights_replaced

    def test_other_backends_are_not_bothered(self) -> None:
        recorder = Recorder()
        for backend in (None, object()):
            self.updater(backend, recorder).update_weights_from_disk(self.request())
        assert recorder.events == ["changed", "changed"]


# ---------------------------------------------------------------- where something is missing

START = """
import sys
sys.argv = ["server"]
{before}
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
for backend in ("file", "maru"):
    arguments = prepare_server_args({arguments!r} + [backend])
    arguments.resolve_once()
    print("STARTED", arguments.hicache_storage_backend, flush=True)
"""


def refused(model: Path, before: str) -> str:
    """Start with ``file`` and then with ``maru`` in a process where ``before`` ran; what was said against ``maru``."""
    done = run_python(START.format(before=before, arguments=[part.format(model=model) for part in ARGUMENTS]))
    assert done.stdout.splitlines() == ["STARTED file"], done.stdout + done.stderr[-3000:]
    assert done.returncode != 0
    return done.stderr


@pytest.mark.sglang
class TestMissing:
    @pytest.mark.parametrize(
        ("before", "named"),
        [
            (
                "from sglang.srt.managers.cache_controller import HiCacheController as C; del C._page_set_zero_copy",
                "HiCacheController._page_set_zero_copy",
            ),
            (
                "from sglang.srt.mem_cache.unified_cache.storage_attachment import StorageAttachment as A\n"
                "A.apply_runtime_config = lambda self, *, storage_backend, chains: None",
                "apply_runtime_config has no parameter hicache_storage_pass_prefix_keys",
            ),
        ],
    )
    def test_a_missing_seam_is_named_at_start(self, model_dir: Path, before: str, named: str) -> None:
        said = refused(model_dir, before)
        assert named in said
        assert "tested with SGLang 0.5.23" in said

    def test_no_way_to_check_means_no_name(self, model_dir: Path) -> None:
        """Where the arguments cannot be checked the name is not offered."""
        gone = "import sglang.srt.arg_groups.hicache_hook as h; original = h.handle_hicache\n"
        said = refused(model_dir, gone + "h.handle_hicache = lambda other: original(other)")
        assert "invalid choice: 'maru'" in said
        assert "handle_hicache has no parameter server_args" in said

    def test_a_broken_maru_does_not_break_sglang(self, model_dir: Path) -> None:
        assert "maru_core" in refused(model_dir, "sys.modules['maru_core'] = None")


def test_importing_the_plugin_is_light() -> None:
    heavy = "{'torch', 'sglang', 'zmq', 'numpy', 'maru_core'}"
    done = run_python(f"import sys, maru_sglang.plugin; print(sorted({heavy} & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stderr
