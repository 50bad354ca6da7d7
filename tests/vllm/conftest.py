"""The real vLLM's configuration classes for the tests of what Maru makes of them; nothing is computed here."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_files import write_model

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


# This folder is on the path too, and has the name of the package: what counts is a real one.
_spec = importlib.util.find_spec("vllm")
_IS_THERE = _spec is not None and _spec.origin is not None

#: Modules that cannot even be imported without vLLM; its environment runs them.
collect_ignore = (
    []
    if _IS_THERE
    else [
        "test_offloading.py",
        "test_tier.py",
        "test_vllm_chains.py",
        "test_vllm_layout.py",
        "test_vllm_paged.py",
        "test_vllm_ranks.py",
        "test_vllm_scheduler.py",
        "test_vllm_worker.py",
    ]
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say why tests of this folder that need vLLM do not run."""
    if _IS_THERE:
        return
    skip = pytest.mark.skip(reason="vLLM is not installed here: make vllm-env, and run these tests with its Python")
    for item in items:
        if item.get_closest_marker("vllm") is not None and Path(__file__).parent in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(model_dir: Path) -> Callable[..., Any]:
    """``engine(**arguments)``: the configuration that vLLM resolves for these arguments, as a server does."""

    def run(**arguments: Any) -> Any:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs

        arguments = {
            "model": str(model_dir), "dtype": "bfloat16", "enforce_eager": True, "block_size": 32, "max_model_len": 256,
            "kv_cache_memory_bytes": 64 << 20, "skip_tokenizer_init": True, "disable_log_stats": True,
            "kv_transfer_config": KVTransferConfig(kv_connector="MaruConnector", kv_role="kv_both"),
        } | arguments  # fmt: skip
        return EngineArgs(**arguments).create_engine_config()

    return run
