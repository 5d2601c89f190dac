"""Answers over int8 blocks equal those over dequantized blocks, in every family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from blockattn_rag.check.model import placed_context
from blockattn_rag.check.oracle import oracle_logits
from blockattn_rag.errors import FingerprintMismatchError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import Assembly, place
from blockattn_rag.kv.rope import relative_error
from blockattn_rag.model import BlockModel
from blockattn_rag.model.probe import LOGITS
from blockattn_rag.store.checks import check_block
from tests.model.families import SUPPORTED
from tests.models import shared_tiny_llama, tiny_model, tiny_tokenizer

FAMILIES = (
    "llama",  # rotates halves
    "phi",  # rotates half of the dimensions
    "glm",  # rotates adjacent pairs
    "smollm3",  # has layers without positions
    "gemma2",  # sliding windows and soft caps: no relay
    "gpt_neox",
    "falcon, one key head",
)
# Here a small change may select another expert, and so have a large effect.
WITH_EXPERTS = ("qwen3_moe", "gpt_oss, attention sinks")
TEXTS = ("Halden Tower is 214 metres tall, they say.", "x", "It was built in 1931.", "How tall?")
BUDGET = LOGITS[torch.float32]


class Case:
    """A model, a tokenized prompt, and its context blocks computed by the model."""

    def __init__(self, model: BlockModel) -> None:
        self.model = model
        *context, self.final = [model.tokenizer.text_ids(text) for text in TEXTS]
        self.ids = context
        self.blocks = [block.kv for block in placed_context(model, context).blocks]

    def logits(self, blocks: list[BlockKV], assembly: Assembly = "copy") -> Tensor:
        model, final = self.model, torch.tensor([self.final])
        chosen = model.choose_assembly(assembly, len(self.final))
        return model.next_logits(final, model.cache_for(place(blocks), assembly=chosen))

    @property
    def assemblies(self) -> list[Assembly]:
        return ["copy", "relay"] if self.model.supports_relay else ["copy"]


@lru_cache(maxsize=1)
def case_of(family: str) -> Case:
    kind, config = SUPPORTED[family]
    return Case(BlockModel(tiny_model(kind, **config), tiny_tokenizer()))


def changed(kv: BlockKV, change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> BlockKV:
    """Return an unquantized block with the states ``change(states, dequantized states, scale)``."""
    made = kv.quantized()
    assert made.scales is not None
    pairs = []
    for layer in range(kv.num_layers):
        states = zip(kv.states(layer), made.states(layer), made.tensors(layer)[2:], strict=True)
        pairs.append([change(*three) for three in states])
    keys, values = zip(*pairs, strict=True)
    return replace(kv, keys=keys, values=values)


@pytest.mark.parametrize("family", [*FAMILIES, *WITH_EXPERTS])
def test_all_paths_read_int8_blocks_as_their_dequantized_states(family: str) -> None:
    case = case_of(family)
    plain = [changed(kv, lambda _, stands_for, __: stands_for) for kv in case.blocks]
    first, *others = case.blocks
    mixtures = {
        "all": ([kv.quantized() for kv in case.blocks], plain),
        "some": ([first, *(kv.quantized() for kv in others)], [first, *plain[1:]]),
    }
    for quantized, same in mixtures.values():
        expected = case.logits(same)
        for assembly in case.assemblies:
            assert relative_error(case.logits(quantized, assembly), expected) <= BUDGET


@pytest.mark.parametrize("family", FAMILIES)
def test_quantization_error_is_at_most_that_of_random_half_steps(family: str) -> None:
    """Relative to the oracle, the error of quantization is at most that of moving every value up or
    down by half a step at random. Quantization moves values by at most half a step, with a root
    mean square of 0.29 steps."""
    case = case_of(family)
    expected = oracle_logits(case.model.hf_model, [*case.ids, case.final])[-1]
    assert relative_error(case.logits(case.blocks), expected) <= BUDGET
    generator = torch.Generator().manual_seed(1)

    def half_a_step(states: Tensor, _: Tensor, scale: Tensor) -> Tensor:
        return states + scale / 2 * torch.randn(states.shape, generator=generator).sign()

    noise = max(
        relative_error(case.logits([changed(kv, half_a_step) for kv in case.blocks]), expected)
        for _ in range(16)
    )
    quantized = [kv.quantized() for kv in case.blocks]
    for assembly in case.assemblies:
        error = relative_error(case.logits(quantized, assembly), expected)
        assert BUDGET < error <= noise


def test_the_dtype_of_the_model_is_that_of_its_cache() -> None:
    model = BlockModel(tiny_model().bfloat16(), tiny_tokenizer())
    case = Case(model)
    quantized = [kv.quantized() for kv in case.blocks]
    cache: Any = model.cache_for(place(quantized), assembly="copy")
    kinds = {t.dtype for layer in cache.layers for t in (layer.keys, layer.values)}
    assert kinds == {torch.bfloat16}
    for assembly in case.assemblies:
        found, expected = case.logits(quantized, assembly), case.logits(case.blocks, assembly)
        assert found.dtype == expected.dtype
        assert bool(found.isfinite().all())


def test_check_block_only_accepts_int8_blocks_of_the_model() -> None:
    case = Case(BlockModel(shared_tiny_llama(), tiny_tokenizer()))
    kv = case.blocks[0].quantized()
    assert kv.scales is not None
    ids, outline = kv.token_ids.tolist(), case.model.profile.token_outline
    check_block(kv, kv.key, ids, outline)
    for other in (
        replace(kv, scales=replace(kv.scales, dtype=torch.bfloat16)),
        replace(kv, scales=None),
    ):
        with pytest.raises(FingerprintMismatchError, match="this model's shape or dtype"):
            check_block(other, kv.key, ids, outline)
    for key, tokens in (("0" * 64, ids), (kv.key, ids[:-1])):
        with pytest.raises(FingerprintMismatchError):
            check_block(kv, key, tokens, outline)
