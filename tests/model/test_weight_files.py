"""Weights are identified by the digests of their files, which are computed once per file."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from blockattn_rag.model import BlockModel, loading
from blockattn_rag.model.checkpoint import CheckpointModel
from blockattn_rag.model.weight_files import WeightFile, WeightFiles
from tests.model.test_fingerprint import next_float
from tests.models import save_model, shared_tiny_llama, tiny_tokenizer

WEIGHTS = "model.safetensors"


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BLOCKATTN_RAG_HOME", str(tmp_path / "home"))
    return save_model(shared_tiny_llama(), tmp_path / "model")


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose digests are computed."""
    names: list[str] = []
    compute = hashlib.file_digest

    def file_digest(stream: Any, digest: Any) -> Any:
        names.append(Path(stream.name).name)
        return compute(stream, digest)

    monkeypatch.setattr(hashlib, "file_digest", file_digest)
    return names


def load(source: str | Path, **options: Any) -> BlockModel:
    return BlockModel.from_pretrained(source, device="cpu", **options)


def files_of(folder: Path) -> WeightFiles:
    files = WeightFiles.of(str(folder))
    assert files is not None
    return files


def with_other_weight() -> Any:
    model = copy.deepcopy(shared_tiny_llama())
    next_float(model)
    return model


def test_a_renamed_copy_has_the_same_fingerprint(saved: Path, tmp_path: Path) -> None:
    first = load(saved).fingerprint
    moved = shutil.copytree(saved, tmp_path / "moved")
    split = save_model(shared_tiny_llama(), tmp_path / "split", max_shard_size="20KB")
    assert load(moved).fingerprint == first
    digests = files_of(split).digests()
    assert len(digests) > 1
    index = split / "model.safetensors.index.json"
    shards = sorted(split.glob("model-*.safetensors"))
    for number, shard in enumerate(shards):
        renamed = shard.rename(split / f"part-{len(shards) - number}.safetensors")
        index.write_text(index.read_text().replace(shard.name, renamed.name))
    assert files_of(split).digests() == digests


def test_every_shard_affects_the_fingerprint(tmp_path: Path, saved: Path) -> None:
    split = save_model(shared_tiny_llama(), tmp_path / "split", max_shard_size="20KB")
    other = save_model(with_other_weight(), tmp_path / "other", max_shard_size="20KB")
    same = {*files_of(split).digests()} & {*files_of(other).digests()}
    assert len(same) == len(files_of(split).files) - 1
    assert load(split).fingerprint != load(other).fingerprint


def test_a_file_is_hashed_once(saved: Path, hashed: list[str]) -> None:
    first = load(saved).fingerprint
    (saved.parent / "link").symlink_to(saved)
    assert load(saved.parent / "link").fingerprint == first
    assert hashed == [WEIGHTS]


def test_a_touched_file_is_hashed_again(saved: Path, hashed: list[str]) -> None:
    path = saved / WEIGHTS
    before, content = WeightFile.at(path).digest(), bytearray(path.read_bytes())
    os.utime(path, ns=(1, 1))
    assert WeightFile.at(path).digest() == before
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(2, 2))
    assert WeightFile.at(path).digest() != before
    assert len(hashed) == 3


def test_a_file_with_the_time_and_size_of_another_is_hashed_again(saved: Path) -> None:
    path = saved / WEIGHTS
    before, stat = WeightFile.at(path), path.stat()
    digest = before.digest()
    with path.open("r+b") as stream:  # keeps the inode
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)[0]
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert WeightFile.at(path) == before
    assert WeightFile.at(path).digest() != digest


def test_file_modes_do_not_affect_the_fingerprint(saved: Path, hashed: list[str]) -> None:
    first, model = load(saved).fingerprint, load(saved)
    (saved / WEIGHTS).chmod(0o600)
    assert model.fingerprint == load(saved).fingerprint == first
    assert hashed == [WEIGHTS] * 2


def test_processes_hash_a_file_once(saved: Path, hashed: list[str]) -> None:
    file = WeightFile.at(saved / WEIGHTS)
    # Threads can stand in for processes, because the file lock also serializes threads.
    with ThreadPoolExecutor(8) as pool:
        assert len({*pool.map(lambda _: file.digest(), range(8))}) == 1
    assert hashed == [WEIGHTS]


def test_a_file_that_changes_while_it_is_hashed_does_not_identify_a_model(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = hashlib.file_digest

    def file_digest(stream: Any, digest: Any) -> Any:
        os.utime(stream.name, ns=(1, 1))
        return compute(stream, digest)

    monkeypatch.setattr(hashlib, "file_digest", file_digest)
    model, checkpoint = load(saved), CheckpointModel(saved, torch.float32)
    assert model.fingerprint == BlockModel(shared_tiny_llama(), tiny_tokenizer()).fingerprint
    os.utime(saved / WEIGHTS, ns=(2, 2))
    with pytest.raises(OSError, match=r"model\.safetensors changed while it was read"):
        _ = checkpoint.fingerprint
    assert not [*(saved.parent / "home" / "digests").glob("*.json")]


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"digest": 1}', b"\xff"])
def test_a_damaged_record_is_ignored(saved: Path, hashed: list[str], damage: bytes) -> None:
    file = WeightFile.at(saved / WEIGHTS)
    digest = file.digest()
    (record,) = (saved.parent / "home" / "digests").glob("*.json")
    record.write_bytes(damage)
    assert file.digest() == digest
    assert len(hashed) == 2


def test_an_unwritable_cache_is_reported(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    (saved.parent / "home").write_text("a file")
    assert WeightFile.at(saved / WEIGHTS).digest()
    assert f"Cannot cache the digest of {saved / WEIGHTS}" in caplog.text


def test_an_unreadable_file_is_no_problem_of_the_cache(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = WeightFile.at(saved / WEIGHTS)
    file.path.unlink()
    with pytest.raises(FileNotFoundError):
        file.digest()
    assert not caplog.text


@pytest.mark.parametrize("is_link", [False, True], ids=["file", "link"])
def test_files_changed_after_loading_do_not_identify_the_model(saved: Path, is_link: bool) -> None:
    current = saved.parent / "current"
    current.symlink_to(saved)
    model = load(current)
    if is_link:
        current.unlink()
        current.symlink_to(save_model(with_other_weight(), saved.parent / "v2"))
    else:
        save_model(with_other_weight(), saved)
    assert model.fingerprint == BlockModel(shared_tiny_llama(), tiny_tokenizer()).fingerprint
    assert load(current).fingerprint != model.fingerprint


def test_changes_of_the_index_are_detected(tmp_path: Path) -> None:
    split = save_model(shared_tiny_llama(), tmp_path / "split", max_shard_size="20KB")
    files = files_of(split)
    assert files.is_current
    index = split / "model.safetensors.index.json"
    index.write_text(index.read_text() + " ")
    assert not files.is_current


def test_changed_weights_are_identified_by_their_tensors(saved: Path) -> None:
    ready = load(shared_tiny_llama(), tokenizer=saved).fingerprint  # type: ignore[arg-type]
    assert ready != load(saved).fingerprint
    changed = load(saved, rms_norm_eps=1e-3)  # any argument may change the loaded weights
    assert changed._files is None
    assert load(saved, attn_implementation="eager").fingerprint == load(saved).fingerprint


@pytest.fixture
def main(saved: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that names the current commit of some/model in a cache of the hub. The cache has
    two commits: ccc..., with the files of ``saved``, and ddd..., with other weights."""
    cache = saved.parent / "hub"
    repository = cache / "models--some--model"
    shutil.copytree(saved, repository / "snapshots" / ("c" * 40))
    save_model(with_other_weight(), repository / "snapshots" / ("d" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.TRANSFORMERS_CACHE", str(cache), raising=False)
    return repository / "refs" / "main"


def test_a_snapshot_of_the_hub_has_the_fingerprint_of_its_files(saved: Path, main: Path) -> None:
    model = load("some/model")
    assert model._files is not None
    assert model.fingerprint == load(saved).fingerprint
    main.write_text("d" * 40)
    assert load("some/model").fingerprint != model.fingerprint
    assert load("some/model", revision="c" * 40).fingerprint == model.fingerprint


def test_a_branch_that_moves_during_loading_has_no_effect(
    saved: Path, main: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = loading.load_model

    def load_model(*arguments: Any, **options: Any) -> Any:
        model = loaded(*arguments, **options)
        # The branch moves after the weights were loaded, but before their files were determined.
        main.write_text("d" * 40)
        return model

    checkpoint = CheckpointModel("some/model", torch.float32)
    monkeypatch.setattr(loading, "load_model", load_model)
    model = load("some/model")
    assert main.read_text() == "d" * 40
    expected = load(saved).fingerprint
    assert model.fingerprint == checkpoint.fingerprint == expected


def test_weights_in_other_files_have_no_digest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "weights.gguf").write_bytes(b"")
    assert WeightFiles.of(str(tmp_path)) is None


def test_weights_in_a_file_that_the_config_names_have_no_digest(saved: Path) -> None:
    (saved / WEIGHTS).rename(saved / "other.safetensors")
    save_model(with_other_weight(), saved.parent / "other")
    shutil.copy(saved.parent / "other" / WEIGHTS, saved)
    config = json.loads((saved / "config.json").read_text())
    config["transformers_weights"] = "other.safetensors"
    (saved / "config.json").write_text(json.dumps(config))
    model = load(saved)
    assert torch.equal(
        model.hf_model.state_dict()["model.layers.1.mlp.down_proj.weight"],
        shared_tiny_llama().state_dict()["model.layers.1.mlp.down_proj.weight"],
    )
    assert model._files is None


@pytest.mark.parametrize(
    ("index", "message"),
    [
        *((text, "index.json is damaged: expected an object") for text in ("[]", "{")),
        ('{"weight_map": []}', "index.json is damaged: expected an object"),
        ('{"weight_map": {"a": "model-1.safetensors"}}', r"model-1\.safetensors"),
    ],
)
def test_damaged_indices_and_missing_shards_are_refused(
    tmp_path: Path, index: str, message: str
) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises((OSError, ValueError), match=message):
        WeightFiles.of(str(tmp_path))
