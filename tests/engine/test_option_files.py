"""Files of options are known by what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from blockattn_rag.attention.context_merge import LearnedMerge
from blockattn_rag.attention.merge_file import save_merge
from blockattn_rag.engine.option_files import file_digests, merge_digest
from blockattn_rag.model import BlockModel
from blockattn_rag.model.correction_file import save_correction
from blockattn_rag.model.reader import Reader
from tests.model.test_correction import correction_of
from tests.models import shared_tiny_llama, tiny_tokenizer

NONE: dict[str, Any] = {"correction": None, "merge": None, "reader": None}


def test_options_without_files_have_no_digests() -> None:
    expected = {"correction_digest": None, "merge_digest": None, "reader_digest": None}
    assert file_digests(NONE) == expected
    none = {"correction": "none", "merge": "scale:0.9", "reader": "none"}
    assert file_digests(none) == expected


def test_a_merge_is_known_by_its_numbers_and_its_model(tmp_path: Path) -> None:
    def digest(name: str, which: int | None = None, fingerprint: str = "f") -> str:
        merge = LearnedMerge(torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(2, 2, 3))
        if which is not None:
            [*merge.parameters()][which][0, 0] += 1
        save_merge(merge, tmp_path / name, fingerprint)
        found = merge_digest(str(tmp_path / name))
        assert found is not None
        return found

    plain = digest("a.safetensors")
    assert digest("b.safetensors") == plain
    others = [digest(f"{n}.safetensors", which=n) for n in range(3)]
    others.append(digest("c.safetensors", fingerprint="g"))
    assert len({plain, *others}) == 5


def test_a_correction_and_a_reader_are_known_by_their_own_digests(tmp_path: Path) -> None:
    model, path = BlockModel(shared_tiny_llama(), tiny_tokenizer()), tmp_path / "kv.safetensors"
    correction, reader = correction_of(model), Reader.new(model.hf_model, rank=1)
    save_correction(correction, path)
    reader.save(tmp_path / "reader", {"fingerprint": model.fingerprint})
    found = file_digests({**NONE, "correction": path, "reader": tmp_path / "reader"})
    assert (found["correction_digest"], found["reader_digest"]) == (
        correction.digest,
        reader.digest,
    )
    path.unlink()
    with pytest.raises(ValueError, match="found no file"):
        file_digests({**NONE, "correction": path})


def test_a_reader_that_peft_wrote_is_known_by_its_files(tmp_path: Path) -> None:
    model, folder = BlockModel(shared_tiny_llama(), tiny_tokenizer()), tmp_path / "reader"

    def digest(seed: int) -> Any:
        Reader.new(model.hf_model, rank=1, seed=seed).save(folder, {"fingerprint": "f"})
        (folder / "reader.json").rename(tmp_path / "reader.json")
        found = file_digests({**NONE, "reader": folder})["reader_digest"]
        (tmp_path / "reader.json").rename(folder / "reader.json")
        return found

    one, same, other = digest(1), digest(1), digest(2)
    assert one == same != other
    assert None not in (one, other)
    assert file_digests({**NONE, "reader": tmp_path})["reader_digest"] is None
