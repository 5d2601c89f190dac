"""Files of learned merges: what is written is read, and nothing else passes for one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockattn_rag.attention.context_merge import FixedMerge, LearnedMerge
from blockattn_rag.attention.merge_file import load_merge, save_merge
from blockattn_rag.files import tensor_file
from tests.attention.test_context_merge import learned

PRINT = "ab" * 32


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "merge.safetensors"
    save_merge(learned(), path, PRINT)
    return path


def loaded(path: Path) -> LearnedMerge:
    found = load_merge(str(path))
    assert isinstance(found, LearnedMerge)
    return found


def test_what_is_written_is_read(path: Path) -> None:
    found = loaded(path)
    assert found.fingerprint == PRINT
    for ours, theirs in zip(learned().parameters(), found.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    trained = LearnedMerge.identity(2, 6, 2, 16)
    save_merge(trained, path, PRINT)
    assert not any(tensor.any() or tensor.requires_grad for tensor in loaded(path).parameters())


def test_what_it_was_made_with_is_told_if_it_is_known(path: Path) -> None:
    assert loaded(path).made_with == {}  # as in files of earlier versions
    told = {"sink": "head:4", "correction": "ab" * 32}
    save_merge(learned(), path, PRINT, {**told, "merge": "none"})
    assert loaded(path).made_with == told


def test_other_texts_are_as_parse_merge_has_them() -> None:
    assert load_merge("none") is None
    assert load_merge("bias:0.5") == FixedMerge("bias", 0.5)
    with pytest.raises(ValueError, match="found merge='bias'"):
        load_merge("bias")


def test_a_file_is_read_again_only_after_it_changed(path: Path) -> None:
    first = loaded(path)
    assert loaded(path) is first
    os.utime(path, ns=(1, 1))
    assert loaded(path) is not first


def test_a_write_that_fails_leaves_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = path.read_bytes()

    def fail(*_: object) -> bytes:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "save", fail)
        with pytest.raises(OSError, match="no space left"):
            save_merge(learned(), path, PRINT)
    broken = learned()
    broken.bias[0, 0] = torch.nan
    with pytest.raises(ValueError, match="found NaN or infinity in bias"):
        save_merge(broken, path, PRINT)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]
    with pytest.raises(ValueError, match=r"ends in \.safetensors"):
        save_merge(learned(), path.with_suffix(".bin"), PRINT)


def sealed(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    save_file(tensors, path, {**metadata, "sha256": tensor_file.digest_of(tensors, metadata)})


def test_what_is_no_learned_merge_is_refused(path: Path) -> None:
    tensors = load_file(path)
    metadata = {"format": "blockattn_rag.context_merge", "version": "1", "fingerprint": PRINT}

    def refused(match: str) -> None:
        with pytest.raises(ValueError, match=match) as refusal:
            load_merge(str(path))
        assert path.name in str(refusal.value)

    sealed(tensors, path, {**metadata, "version": "2"})
    refused("found format 'blockattn_rag.context_merge', version '2', expected")
    save_file(tensors, path)
    refused("found format None")
    sealed({"bias": tensors["bias"]}, path, metadata)
    refused(r"found tensors of dimensions \{'bias': 2\}, expected")
    sealed({**tensors, "bias": tensors["bias"][:, :4].clone()}, path, metadata)
    refused("found tensors of shapes")
    sealed({**tensors, "shift": tensors["shift"].repeat(1, 2, 1)}, path, metadata)
    refused("found tensors of shapes")  # six heads cannot share four key-value heads
    sealed(tensors, path, {k: v for k, v in metadata.items() if k != "fingerprint"})
    refused("does not tell fingerprint")
    sealed({**tensors, "bias": tensors["bias"] / 0}, path, metadata)
    refused("found NaN or infinity in bias")
    path.write_bytes(b"not a file of tensors")
    refused("is no file of a learned merge")
    path.unlink()
    refused(r"found no file .* \(No such file or directory\)")
