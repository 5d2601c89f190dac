"""Corrections: their effect on keys and values, the blocks that they apply to, and their files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.rope import relative_error
from blockattn_rag.model import BlockModel, EncodeRequest
from blockattn_rag.model.correction import (
    Correction,
    LayerCorrection,
    places,
    read_correction,
    save_correction,
)
from blockattn_rag.prompts.blocks import Block
from blockattn_rag.store import DirectoryStore
from tests.models import tiny_model, tiny_tokenizer
from tests.recipes import correction_of, recipe_of

A, B, Q = "Halden Tower is 214 metres tall.", "It was built in 1931.", "How tall?"


@pytest.fixture(scope="module")
def model() -> BlockModel:
    return BlockModel(tiny_model(), tiny_tokenizer())


def encoded(model: BlockModel, correction: Correction | None = None, tokens: int = 9) -> BlockKV:
    ids = list(range(1, tokens + 1))
    [[kv]] = model.encode([EncodeRequest(ids, "digest", "handle", (5, 6))])
    return kv if correction is None else correction.corrected(kv, model.profile.layouts)


def test_positions_share_constants_in_growing_groups() -> None:
    assert places(70).tolist() == [0, 1, 2, 2, *[3] * 4, *[4] * 8, *[5] * 16, *[6] * 32, *[7] * 6]


def test_each_head_adds_its_linear_map_and_its_constants(model: BlockModel) -> None:
    """Compared with a computation token by token, with an explicit rotation."""
    correction = correction_of(model)
    plain, found = encoded(model), encoded(model, correction)
    layout = model.profile.layouts[1]
    weight, bias = correction.layers[1]
    half = plain.keys[1].shape[-1] // 2

    def turned(key: torch.Tensor, position: int) -> torch.Tensor:
        angle = position * layout.frequencies.float()
        first, second = key[:half], key[half:]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin])

    for head in range(2):
        for at in (0, 3, 8):
            key, value = plain.keys[1][head, at], plain.values[1][head, at]
            states = torch.cat([turned(key, -at), value])
            change = states @ weight[head] + bias[head, (0, 0, 0, 2, 0, 0, 0, 0, 4)[at]]
            expected = key + turned(change[: 2 * half], at)
            assert relative_error(found.keys[1][head, at], expected) < 1e-5
            assert relative_error(found.values[1][head, at], value + change[2 * half :]) < 1e-5


def test_a_correction_of_zeros_changes_nothing(model: BlockModel) -> None:
    plain, found = encoded(model), encoded(model, correction_of(model, size=0))
    assert all(map(torch.equal, plain.keys + plain.values, found.keys + found.values))


def test_corrected_and_plain_blocks_are_different_entries(model: BlockModel) -> None:
    recipe = recipe_of(model, sink="none")
    engine = BlockAttentionEngine(model, recipe="none")
    handles = engine.encode([A], recipe=recipe)
    assert handles == [Block(A).handle]
    assert not engine.contains(Block(A))
    corrected = BlockAttentionEngine(model, engine.store, recipe=recipe)
    assert corrected.contains(Block(A))
    assert corrected.generate(["x", A, Q], max_new_tokens=1).stats.hits == 1
    # The hit is "x", because A is only stored with the correction.
    assert engine.generate(["x", A, Q], max_new_tokens=1).stats.hits == 1


def test_plain_entries_are_corrected(model: BlockModel, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(model, sink="none")
    engine = BlockAttentionEngine(model, recipe="none")
    fresh = BlockAttentionEngine(model, recipe=recipe)
    expected = fresh.answer_logits(["x", A, B, Q], [0])
    engine.encode([A])
    computed: list[str] = []
    encode = BlockModel.encode

    def noted(one: BlockModel, requests: Any, **options: Any) -> Any:
        computed.extend(request.handle for request in requests)
        return encode(one, requests, **options)

    monkeypatch.setattr(BlockModel, "encode", noted)
    found = engine.answer_logits(["x", A, B, Q], [0], recipe=recipe)
    assert relative_error(found, expected) < 1e-4  # computed in different batches
    assert computed == [Block("x").handle, Block(B).handle]
    assert engine.encode([A, B], recipe=recipe) == [Block(A).handle, Block(B).handle]
    assert engine.contains(Block(A))
    assert not engine.contains(Block(B))


def test_a_repeated_first_passage_is_two_blocks() -> None:
    """Without BOS, both are encoded in the same way, but only the second one is corrected."""
    model = BlockModel(tiny_model(), tiny_tokenizer(bos=False))
    engine = BlockAttentionEngine(model, recipe=recipe_of(model, sink="none"))
    found = engine.answer_logits([A, A, Q], [0])  # both are misses
    assert torch.equal(found, engine.answer_logits([A, A, Q], [0]))
    apart = BlockAttentionEngine(model, engine.store, recipe=engine.recipe)
    stats = apart.generate([A, A, Q], max_new_tokens=1).stats
    assert (stats.hits, stats.misses, stats.reused_tokens) == (2, 0, 2 * len(A))


def test_a_damaged_entry_is_not_corrected(model: BlockModel, tmp_path: Path) -> None:
    recipe = recipe_of(model, sink="none")
    engine = BlockAttentionEngine(model, DirectoryStore(tmp_path / "kv"), recipe="none")
    expected = engine.answer_logits(["x", A, Q], [0], recipe=recipe)
    engine = BlockAttentionEngine(model, DirectoryStore(tmp_path / "other"), recipe="none")
    engine.encode([A])
    [entry] = (tmp_path / "other" / "objects").rglob("*.safetensors")
    entry.write_bytes(entry.read_bytes()[:-8])
    assert torch.equal(engine.answer_logits(["x", A, Q], [0], recipe=recipe), expected)


def test_a_saved_correction_is_loaded_unchanged(model: BlockModel, tmp_path: Path) -> None:
    correction, path = correction_of(model, sink="bos"), tmp_path / "kv.safetensors"
    save_correction(correction, path)
    found = read_correction(path)
    assert (found.sink, found.fingerprint) == ("bos", model.fingerprint)
    assert found == correction


def test_bfloat16_corrections_take_half_the_bytes(model: BlockModel, tmp_path: Path) -> None:
    whole, half = tmp_path / "whole.safetensors", tmp_path / "half.safetensors"
    correction = correction_of(model)
    rounded = [LayerCorrection(*(t.bfloat16().float() for t in one)) for one in correction.layers]
    save_correction(correction, whole)
    save_correction(replace(correction, layers=tuple(rounded)), half)
    assert load_file(half)["weight.0"].dtype == torch.bfloat16
    assert read_correction(half).layers[0].weight.dtype == torch.float32
    assert read_correction(half) == replace(correction, layers=tuple(rounded))
    assert half.stat().st_size < 0.6 * whole.stat().st_size


def test_digests_depend_on_contents_and_sinks(model: BlockModel) -> None:
    one, other = correction_of(model), correction_of(model, sink="bos")
    assert len({one.digest, other.digest, correction_of(model, size=0.2).digest}) == 3
    layouts = model.profile.layouts
    blocks = [encoded(model), *(c.corrected(encoded(model), layouts) for c in (one, other))]
    assert len({kv.digest for kv in blocks}) == 3


def test_other_kinds_of_files_are_refused(model: BlockModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Cannot read the correction file"):
        read_correction(tmp_path / "none.safetensors")
    path = tmp_path / "kv.safetensors"
    save_correction(correction_of(model), path)
    tensors = load_file(path)
    metadata = {
        "format": "blockattn_rag.correction", "version": "1", "sink": "none", "fingerprint": "f"
    }  # fmt: skip
    broken: list[tuple[dict[str, torch.Tensor], dict[str, str], str]] = [
        (tensors, {**metadata, "version": "9"}, "found {'version': '9'}, expected"),
        (tensors, {}, "found {'format': None, 'version': None}"),
        ({"weight.0": tensors["weight.0"]}, metadata, "found 1 tensors"),
        ({k.replace("bias.1", "x"): v for k, v in tensors.items()}, metadata, "tensor bias.1"),
        ({**tensors, "bias.0": tensors["bias.0"][:, 1:].contiguous()}, metadata, "found shapes"),
        ({**tensors, "bias.0": tensors["bias.0"] / 0}, metadata, "NaN or infinity in bias.0"),
        ({**tensors, "bias.0": torch.tensor(1.0)}, metadata, "found shapes"),
        ({**tensors, "bias.0": tensors["bias.0"].int()}, metadata, "found torch.int32 in bias.0"),
        (tensors, {k: v for k, v in metadata.items() if k != "sink"}, "metadata lacks sink"),
    ]
    for number, (held, told, message) in enumerate(broken):
        file = tmp_path / f"{number}.safetensors"
        save_file(held, file, told)
        with pytest.raises(ValueError, match=message):
            read_correction(file)
    (tmp_path / "text.safetensors").write_text("no tensors")
    with pytest.raises(ValueError, match="Cannot read the correction file"):
        read_correction(tmp_path / "text.safetensors")
