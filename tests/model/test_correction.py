"""Corrections: what they do to keys and values, which blocks are corrected, and their files."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.files.tensor_file import digest_of
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import place
from blockattn_rag.kv.rope import relative_error
from blockattn_rag.model import BlockModel, EncodeRequest
from blockattn_rag.model.correction import NUM_PLACES, Correction, LayerCorrection, places
from blockattn_rag.model.correction_file import load_correction, save_correction
from blockattn_rag.prompts.blocks import Block
from blockattn_rag.store import DirectoryStore
from tests.models import tiny_model, tiny_tokenizer

A, B, Q = "Halden Tower is 214 metres tall.", "It was built in 1931.", "How tall?"


@pytest.fixture(scope="module")
def model() -> BlockModel:
    return BlockModel(tiny_model(), tiny_tokenizer())


def correction_of(model: BlockModel, *, sink: str = "none", size: float = 0.1) -> Correction:
    """A random correction for a model."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return size * torch.randn(*shape, generator=generator)

    outline = model.profile.token_outline
    half = len(outline) // 2
    layers = []
    for (heads, key_size, _), (_, value_size, _) in zip(
        outline[:half], outline[half:], strict=True
    ):
        states = key_size + value_size
        layers.append(
            LayerCorrection(random(heads, states, states), random(heads, NUM_PLACES, states))
        )
    return Correction(tuple(layers), sink, model.fingerprint)


def saved(correction: Correction, folder: Path) -> str:
    path = folder / "kv.safetensors"
    save_correction(correction, path)
    return str(path)


def encoded(model: BlockModel, correction: Correction | None = None, tokens: int = 9) -> BlockKV:
    ids = list(range(1, tokens + 1))
    [[kv]] = model.encode([EncodeRequest(ids, "digest", "handle", (5, 6))])
    return kv if correction is None else correction.corrected(kv, model.profile.layouts)


def test_places_share_constants_in_groups_that_grow() -> None:
    assert places(70).tolist() == [0, 1, 2, 2, *[3] * 4, *[4] * 8, *[5] * 16, *[6] * 32, *[7] * 6]


def test_each_head_gets_its_map_of_unrotated_states_and_its_constants(model: BlockModel) -> None:
    """Token by token, with the rotation of a Llama written out."""
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


@pytest.mark.parametrize("assembly", ["relay", "copy"])
def test_every_block_of_a_prompt_but_its_first_is_corrected(
    model: BlockModel, tmp_path: Path, assembly: Any
) -> None:
    correction = correction_of(model)
    engine = BlockAttentionEngine(model, correction=saved(correction, tmp_path))
    tokenizer = model.tokenizer
    ids = [tokenizer.block_ids(Block(t), first=not i) for i, t in enumerate(("first", A, B))]
    requests = [EncodeRequest(one, str(i), "") for i, one in enumerate(ids)]
    plain_blocks = {kv.digest: kv for batch in model.encode(requests) for kv in batch}
    first, *others = [plain_blocks[str(i)] for i in range(3)]
    context = place([first, *(correction.corrected(kv, model.profile.layouts) for kv in others)])
    final = tokenizer.final_ids(Q, first=False)
    expected = model.answer_logits(
        context.token_ids, final, [0], model.cache_for(context, assembly="copy")
    )
    prompt = ["first", A, B, Q]
    found = engine.answer_logits(prompt, [0], assembly=assembly)
    assert relative_error(found, expected) < 1e-4
    plain = engine.answer_logits(prompt, [0], assembly=assembly, correction="none")
    assert relative_error(plain, expected) > 1e-2


def test_corrected_and_plain_blocks_are_two_entries(model: BlockModel, tmp_path: Path) -> None:
    path = saved(correction_of(model), tmp_path)
    engine = BlockAttentionEngine(model)
    handles = engine.encode([A], correction=path)
    assert handles == [Block(A).handle]
    assert not engine.contains(Block(A))
    corrected = BlockAttentionEngine(model, engine.store, correction=path)
    assert corrected.contains(Block(A))
    assert corrected.generate(["x", A, Q], max_new_tokens=1).stats.hits == 1
    assert engine.generate(["x", A, Q], max_new_tokens=1).stats.hits == 1  # "x", not A


def test_what_is_stored_without_a_correction_is_corrected_and_not_computed_again(
    model: BlockModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(correction_of(model), tmp_path)
    engine = BlockAttentionEngine(model)
    fresh = BlockAttentionEngine(model, correction=path)
    expected = fresh.answer_logits(["x", A, B, Q], [0])
    engine.encode([A])
    computed: list[str] = []
    encode = BlockModel.encode

    def noted(one: BlockModel, requests: Any, **options: Any) -> Any:
        computed.extend(request.handle for request in requests)
        return encode(one, requests, **options)

    monkeypatch.setattr(BlockModel, "encode", noted)
    found = engine.answer_logits(["x", A, B, Q], [0], correction=path)
    assert relative_error(found, expected) < 1e-4  # batched otherwise
    assert computed == [Block("x").handle, Block(B).handle]
    assert engine.encode([A, B], correction=path) == [Block(A).handle, Block(B).handle]
    assert engine.contains(Block(A))
    assert not engine.contains(Block(B))


def test_a_passage_that_opens_a_prompt_and_comes_again_is_two_blocks(tmp_path: Path) -> None:
    """Without a BOS token both are encoded alike, and only the later one is corrected."""
    model = BlockModel(tiny_model(), tiny_tokenizer(bos=False))
    engine = BlockAttentionEngine(model, correction=saved(correction_of(model), tmp_path))
    found = engine.answer_logits([A, A, Q], [0])  # neither was there
    assert torch.equal(found, engine.answer_logits([A, A, Q], [0]))
    apart = BlockAttentionEngine(model, engine.store, correction=engine.defaults.correction)
    stats = apart.generate([A, A, Q], max_new_tokens=1).stats
    assert (stats.hits, stats.misses, stats.reused_tokens) == (2, 0, 2 * len(A))


def test_a_damaged_entry_is_not_corrected(model: BlockModel, tmp_path: Path) -> None:
    path = saved(correction_of(model), tmp_path)
    engine = BlockAttentionEngine(model, DirectoryStore(tmp_path / "kv"))
    expected = engine.answer_logits(["x", A, Q], [0], correction=path)
    engine = BlockAttentionEngine(model, DirectoryStore(tmp_path / "other"))
    engine.encode([A])
    [entry] = (tmp_path / "other").rglob("*.safetensors")
    entry.write_bytes(entry.read_bytes()[:-8])
    assert torch.equal(engine.answer_logits(["x", A, Q], [0], correction=path), expected)


def test_a_correction_is_for_one_model_and_one_sink(model: BlockModel, tmp_path: Path) -> None:
    path = saved(correction_of(model, sink="head:2"), tmp_path)
    engine = BlockAttentionEngine(model, sink="head:2", correction=path)
    with pytest.raises(ValueError, match=r"after sink='head:2', found sink='none'"):
        engine.generate([A, Q], sink="none")
    with pytest.raises(ValueError, match="found sink='none'"):
        BlockAttentionEngine(model, correction=path)
    other = BlockModel(tiny_model(seed=1), tiny_tokenizer())
    with pytest.raises(ValueError, match=r"was fitted to the model .*adapt --fit correction"):
        BlockAttentionEngine(other, sink="head:2", correction=path)


def test_a_file_gives_back_what_was_saved(model: BlockModel, tmp_path: Path) -> None:
    correction = correction_of(model, sink="bos")
    path = saved(correction, tmp_path)
    found = load_correction(path)
    assert (found.sink, found.fingerprint) == ("bos", model.fingerprint)
    assert found.digest == correction.digest
    assert load_correction(path) is found  # read once
    save_correction(correction_of(model, sink="bos", size=0.2), Path(path))
    assert load_correction(path).digest != found.digest


def test_a_file_of_the_same_size_and_time_is_read_anew(model: BlockModel, tmp_path: Path) -> None:
    """As files out of an archive are."""
    paths = [tmp_path / "one.safetensors", tmp_path / "other.safetensors"]
    for size, path in zip((0.1, 0.2), paths, strict=True):
        save_correction(correction_of(model, size=size), path)
        os.utime(path, (1e9, 1e9))
    before = load_correction(paths[0]).digest
    paths[1].replace(paths[0])
    assert load_correction(paths[0]).digest != before


def test_a_file_in_16_bits_corrects_in_float32(model: BlockModel, tmp_path: Path) -> None:
    path = Path(saved(correction_of(model), tmp_path))
    metadata = {
        "format": "blockattn_rag.correction", "version": "2", "sink": "none",
        "fingerprint": model.fingerprint,
    }  # fmt: skip
    sealed({name: tensor.half() for name, tensor in load_file(path).items()}, path, metadata)
    found = encoded(model, load_correction(path))
    assert relative_error(found.keys[1], encoded(model, correction_of(model)).keys[1]) < 1e-2


def test_digests_tell_contents_and_sinks_apart(model: BlockModel) -> None:
    one, other = correction_of(model), correction_of(model, sink="bos")
    assert len({one.digest, other.digest, correction_of(model, size=0.2).digest}) == 3
    assert one.digest_of("block") != other.digest_of("block") != "block"


def sealed(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a file whose checksum is right, whatever it holds."""
    save_file(tensors, path, {**metadata, "sha256": digest_of(tensors, metadata)})


def without(held: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in held.items() if key != name}


def test_files_of_other_kinds_are_refused(model: BlockModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"found no file .*adapt --fit correction"):
        load_correction(tmp_path / "none.safetensors")
    path = Path(saved(correction_of(model), tmp_path))
    tensors = load_file(path)
    metadata = {
        "format": "blockattn_rag.correction", "version": "2", "sink": "none", "fingerprint": "f"
    }  # fmt: skip
    broken: list[tuple[dict[str, torch.Tensor], dict[str, str], str]] = [
        (
            tensors,
            {**metadata, "version": "9"},
            "found format 'blockattn_rag.correction', version '9'",
        ),
        (tensors, {}, "found format None"),
        ({"weight.0": tensors["weight.0"]}, metadata, "found 1 tensors"),
        (
            {k: v for k, v in tensors.items() if k != "bias.1"} | {"x": torch.ones(1)},
            metadata,
            "found no tensor bias.1",
        ),
        ({**tensors, "bias.0": tensors["bias.0"][:, 1:].contiguous()}, metadata, "found shapes"),
        ({**tensors, "bias.0": tensors["bias.0"] / 0}, metadata, "NaN or infinity in bias.0"),
        ({**tensors, "bias.0": torch.tensor(1.0)}, metadata, "found shapes"),
        ({**tensors, "bias.0": tensors["bias.0"].int()}, metadata, "found torch.int32 in bias.0"),
        ({**tensors, "bias.0": tensors["bias.0"].double()}, metadata, "torch.float64 in bias.0"),
        (tensors, without(metadata, "sink"), "does not tell sink"),
    ]
    for number, (held, told, message) in enumerate(broken):
        file = tmp_path / f"{number}.safetensors"
        sealed(held, file, told)
        with pytest.raises(ValueError, match=message):
            load_correction(file)
    (tmp_path / "text.safetensors").write_text("no tensors")
    with pytest.raises(ValueError, match="is no file of a correction"):
        load_correction(tmp_path / "text.safetensors")
    with pytest.raises(ValueError, match="one that ends in"):
        save_correction(correction_of(model), tmp_path / "kv.bin")


def test_a_file_of_version_1_is_refused_with_what_to_do(model: BlockModel, tmp_path: Path) -> None:
    """Such files have no checksum."""
    path = Path(saved(correction_of(model), tmp_path))
    metadata = {"format": "blockattn_rag.correction", "version": "1", "sink": "none"}
    save_file(load_file(path), path, {**metadata, "fingerprint": model.fingerprint})
    with pytest.raises(ValueError, match=r"version '1', expected .*'2'.* adapt --fit correction"):
        load_correction(path)


def test_no_flipped_bit_changes_a_correction(model: BlockModel, tmp_path: Path) -> None:
    path = Path(saved(correction_of(model), tmp_path))
    content, digest = path.read_bytes(), load_correction(path).digest
    header = 8 + int.from_bytes(content[:8], "little")
    drawn = random.Random(3)
    in_header = [drawn.randrange(8 * header) for _ in range(120)]
    in_tensors = [drawn.randrange(8 * header, 8 * len(content)) for _ in range(60)]
    detected = 0
    for bit in [*range(64), *in_header, *in_tensors]:
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            found = load_correction(path)
        except ValueError:
            detected += 1
        else:
            assert (found.digest, found.sink) == (digest, "none")
            assert found.fingerprint == model.fingerprint
    assert detected >= 64 + len(in_tensors)


@pytest.mark.parametrize("change", ["a layer less", "a layer more", "a head less", "another size"])
def test_a_correction_of_other_shapes_than_the_models_is_refused(
    model: BlockModel, tmp_path: Path, change: str
) -> None:
    correction = correction_of(model)
    layers = list(correction.layers)
    weight, bias = layers[-1]
    if change == "a layer less":
        layers.pop()
    elif change == "a layer more":
        layers.append(LayerCorrection(weight.clone(), bias.clone()))
    elif change == "a head less":
        layers[-1] = LayerCorrection(weight[:1].clone(), bias[:1].clone())
    else:
        layers[-1] = LayerCorrection(weight[:, 1:, 1:].clone(), bias[..., 1:].clone())
    assert len(weight) > 1
    path = saved(Correction(tuple(layers), "none", model.fingerprint), tmp_path)
    with pytest.raises(ValueError, match=r"does not fit: found layers of .* expected .* for this"):
        BlockAttentionEngine(model, correction=path)
