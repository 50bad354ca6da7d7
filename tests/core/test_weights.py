"""Weights are told apart by their content: another fine-tune is another digest, a copy is the same one."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
from model_files import write_model, write_safetensors

from maru_core import weights as weights_module
from maru_core.errors import ConfigError
from maru_core.weights import locate_model, weights_digest

digest_of = partial(weights_digest, option="--model-path")


def test_the_same_weights_at_two_paths_are_the_same(tmp_path: Path) -> None:
    one = write_model(tmp_path / "one")
    two = tmp_path / "elsewhere" / "two"
    shutil.copytree(one, two)
    (two / "README.md").write_text("a copy")
    (two / "tokenizer.json").write_text("{}")
    assert digest_of(one) == digest_of(two)


@pytest.mark.parametrize("whole_file", [weights_module.WHOLE_FILE, 0], ids=["whole", "sampled"])
def test_another_fine_tune_is_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_file: int) -> None:
    monkeypatch.setattr(weights_module, "WHOLE_FILE", whole_file)
    digests = [digest_of(write_model(tmp_path / str(seed), seed=seed)) for seed in (0, 1, 0)]
    assert digests[0] == digests[2] != digests[1]


def test_a_change_of_one_small_tensor_in_a_large_file_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "WHOLE_FILE", 0)
    sizes = {"big": 1 << 20, "norm": 64, "other": 1 << 18}
    base = write_model(tmp_path / "m")
    write_safetensors(base / "model.safetensors", sizes, 5)
    before = digest_of(base)
    file = base / "model.safetensors"
    data = bytearray(file.read_bytes())
    at = len(data) - 4 * (sizes["other"]) - 4 * 32  # in the middle of "norm"
    data[at] ^= 1
    file.write_bytes(data)
    assert digest_of(base) != before
    data[at] ^= 1
    file.write_bytes(data)
    assert digest_of(base) == before


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "preprocessor_config.json"])
def test_settings_beside_the_weights_count(tmp_path: Path, name: str) -> None:
    base = write_model(tmp_path / "m")
    before = digest_of(base)
    (base / name).write_text('{"changed": true}')
    assert digest_of(base) != before


def test_code_of_the_model_counts_where_it_runs(tmp_path: Path) -> None:
    base = write_model(tmp_path / "m")
    before = digest_of(base), digest_of(base, code=True)
    (base / "modeling.py").write_text("x = 1")
    assert digest_of(base) == before[0]
    assert digest_of(base, code=True) != before[1]


def test_damaged_safetensors_are_still_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "WHOLE_FILE", 0)
    base, seen = write_model(tmp_path / "m"), set()
    for body in (b"\xff" * 9000, b"\0" * 9000, b"\x02\0\0\0\0\0\0\0{}" + b"a" * 900, b"\x04\0\0\0\0\0\0\0null"):
        (base / "model.safetensors").write_bytes(body)
        seen.add(digest_of(base))
    assert len(seen) == 4


def test_no_weights_or_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no weights"):
        digest_of(tmp_path / "empty")
    for path in (str(tmp_path / "gone"), "s3://bucket/model"):
        with pytest.raises(ConfigError, match="give --model-path a local directory"):
            locate_model(path, None, str(tmp_path), option="--model-path")
