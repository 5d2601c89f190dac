"""Fitting a correction in closed form, by least squares."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from blockattn_rag.check.model import placed_context
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.kv import assemble, relative_error
from blockattn_rag.lab.repair.closed_form import Sums, fit_correction
from blockattn_rag.model import BlockModel, EncodeRequest
from blockattn_rag.model.correction import NUM_PLACES, Correction, places
from blockattn_rag.prompts.sinks import sink_ids
from tests.models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def model() -> BlockModel:
    return BlockModel(tiny_model(), tiny_tokenizer())


def contexts_of(prompts: int, seed: int = 0) -> list[list[list[int]]]:
    """Return random prompts of a head and three passages, each of twelve tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = (prompts, 4, 12)
    return torch.randint(256, shape, generator=generator).tolist()


def test_a_linear_difference_is_recovered() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = 0.3 * torch.randn(2, 6, 6, generator=generator)
    bias = torch.randn(2, NUM_PLACES, 6, generator=generator)
    sums = Sums(2, 6)
    for _ in range(40):
        block = torch.randn(2, 80, 6, generator=generator)
        sums.add(block, block + block @ weight + bias[:, places(80)])
    solution = sums.solve(1e-9)
    assert relative_error(solution[:, :6].float(), weight) < 1e-3
    assert relative_error(solution[:, 6:].float(), bias) < 0.05  # shrunk by the prior
    assert float(sums.left(solution).sum() / sums.yy.sum()) < 1e-3
    nothing = torch.zeros_like(solution)
    assert torch.equal(sums.left(nothing), sums.yy)


def test_the_residual_matches_its_definition() -> None:
    generator = torch.Generator().manual_seed(1)
    block, full = torch.randn(2, 1, 5, 4, generator=generator)
    sums = Sums(1, 4)
    sums.add(block, full)
    solution = torch.randn(1, 4 + NUM_PLACES, 4, generator=generator, dtype=torch.float64)
    change = block.double() @ solution[:, :4] + solution[:, 4:][:, places(5)]
    expected = (full - block - change).square().sum(dim=1)
    assert torch.allclose(sums.left(solution), expected)


def test_a_corrected_context_is_closer_to_full_attention(model: BlockModel) -> None:
    """The distance is measured on held-out prompts."""
    every = contexts_of(60)
    ticks: list[tuple[int, int]] = []
    correction = fit_correction(
        model, every[:48], every[48:], sink="head:2", on_progress=lambda *tick: ticks.append(tick)
    )
    assert ticks == [(done, 60) for done in range(61)]
    assert (correction.sink, correction.fingerprint) == ("head:2", model.fingerprint)
    plain, corrected = (distances(model, every[48:], one) for one in (None, correction))
    assert corrected[0] == pytest.approx(plain[0], abs=1e-6)  # the first layer does not differ
    assert (
        max(after / before for before, after in zip(plain[1:], corrected[1:], strict=True)) < 0.98
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_rounding_of_16_bits_is_not_fitted(dtype: torch.dtype) -> None:
    """In the first layer, keys only differ by the rounding of rotations, and values are equal."""
    rounded = BlockModel(tiny_model().to(dtype), tiny_tokenizer())  # type: ignore[arg-type]
    every = contexts_of(10)
    correction = fit_correction(rounded, every[:8], every[8:], sink="head:2")
    assert not any(tensor.any() for tensor in correction.layers[0])
    assert all(layer.weight.any() for layer in correction.layers[1:])


def distances(
    model: BlockModel, contexts: list[list[list[int]]], correction: Correction | None
) -> list[float]:
    """Return the squared differences between the keys of full attention and of blocks, by layer."""
    before = sink_ids("head:2", model.tokenizer)
    recipe = Recipe("head:2", correction, fingerprints=(model.fingerprint,))
    sums = [0.0] * len(model.profile.layouts)
    for context in contexts:
        placed = placed_context(model, context, before, recipe)
        [[full]] = model.encode([EncodeRequest([*chain(*context)], "", "")])
        for layer, (keys, _) in enumerate(assemble(placed, model.profile.layouts)):
            difference = (full.keys[layer] - keys)[:, len(context[0]) :]
            sums[layer] += float(difference.square().sum())
    return sums


def test_too_few_prompts_are_refused(model: BlockModel) -> None:
    for held_out in ([], [[[1, 2]]]):
        with pytest.raises(ValueError, match=f"Found 1 prompts .* and {len(held_out)} held-out"):
            fit_correction(model, contexts_of(1), held_out)
