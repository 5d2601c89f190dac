"""Diagnosis of a recipe's remaining divergence, by replacing some of its keys and values.

Each change takes some of the passages' keys and values from full mode, and all others from the
recipe. The divergence that a change removes is the maximum gain of an adapter that predicts these
keys and values exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import torch
from rows import Answerer, divergence
from sets import Item
from torch import Tensor

from blockattn_rag.check.model import placed_context
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import Context, assemble, place
from blockattn_rag.model import BlockModel, EncodeRequest
from blockattn_rag.model.recompute import attention_to_context, can_recompute
from blockattn_rag.prompts.sinks import sink_ids

NOTHING = "nothing"
CHANGES = (
    *(NOTHING, "keys", "values", "first 16 tokens of each passage", "the passage with the answer"),
    *("lowest third of layers", "middle third of layers", "highest third of layers"),
    "everything",
)
"""Keys and values of the passages that are taken from full mode."""


@dataclass(frozen=True, slots=True)
class Change:
    """Effect of a change on a question.

    Args:
        kl, agreement: See ``lab.evaluation.fidelity``.
        attended: Index of the passage that the question attends to most, -1 if not measured.
        attended_in_full: The same in full mode.
        best: Index of the passage with the answer.
    """

    set: str
    id: str
    change: str
    kl: float
    agreement: float
    attended: int
    attended_in_full: int
    best: int

    @property
    def name(self) -> str:
        return self.change


def diagnose(
    answerer: Answerer, recipe: Recipe, item: Item, changes: Sequence[str] = CHANGES
) -> Iterator[Change]:
    """Yield the effects of changes on a question."""
    model, prompt = answerer.engine.model, answerer.prompt(item)
    answer, expected = answerer.full_answer(prompt)
    ids = model.tokenizer.prompt_ids(prompt)
    sink = sink_ids(recipe.sink, model.tokenizer)
    found = placed_context(model, ids.context, sink, recipe)
    full = _full(model, ids.context)
    attended = attended_in_full = -1
    passages = [index for index, block in enumerate(prompt.context) if block.is_passage]
    if can_recompute(model):
        attended, attended_in_full = (
            _most_attended(model, context, ids.final, passages)
            for context in (found, _sliced(full, ids.context))
        )
    own = joined(model, found, full)
    for name in changes:
        mask = _mask(name, ids.context, passages, item.best, len(own.keys))
        context = place([_spliced(own, full, *mask)])
        cache = model.cache_for(context)
        logits = model.answer_logits([], ids.final, answer.token_ids, cache)
        measured = divergence(logits, expected)
        yield Change(item.set, item.id, name, *measured, attended, attended_in_full, item.best)


def _full(model: BlockModel, context: Sequence[list[int]]) -> BlockKV:
    """Return all blocks of a prompt, computed in full mode, as a single block."""
    [[kv]] = model.encode([EncodeRequest([*chain.from_iterable(context)], "full", "")])
    return kv


def _sliced(full: BlockKV, context: Sequence[list[int]]) -> Context:
    """Return full mode's keys and values as separate blocks, with keys at their final positions."""
    ends = torch.tensor([0, *map(len, context)]).cumsum(0).tolist()
    blocks = [
        replace(
            full,
            keys=tuple(keys[:, start:end] for keys in full.keys),
            values=tuple(values[:, start:end] for values in full.values),
            token_ids=full.token_ids[start:end],
            digest=f"full {start}",
        )
        for start, end in pairwise(ends)
    ]
    return place(blocks, "composite")


def joined(model: BlockModel, context: Context, full: BlockKV) -> BlockKV:
    """Concatenate a context's blocks, with keys re-encoded for their positions."""
    keys, values = zip(*assemble(context, model.profile.layouts), strict=True)
    return replace(full, keys=keys, values=values, digest="joined")


def _spliced(joined: BlockKV, full: BlockKV, keys: Tensor, values: Tensor) -> BlockKV:
    """Replace keys and values of ``joined`` with full mode's where the masks are True.

    ``keys``, ``values``: Masks ``[layers, tokens]``.
    """

    def chosen(
        ours: Sequence[Tensor], theirs: Sequence[Tensor], masks: Tensor
    ) -> tuple[Tensor, ...]:
        layers = zip(ours, theirs, masks, strict=True)
        return tuple(torch.where(mask[None, :, None], b, a) for a, b, mask in layers)

    return replace(
        joined,
        keys=chosen(joined.keys, full.keys, keys),
        values=chosen(joined.values, full.values, values),
    )


def _mask(
    name: str, context: Sequence[list[int]], passages: Sequence[int], best: int, layers: int
) -> tuple[Tensor, Tensor]:
    """Return masks ``[layers, tokens]`` of the keys and of the values that a change replaces."""
    at = torch.tensor([index for index, ids in enumerate(context) for _ in ids])
    within = torch.tensor([offset for ids in context for offset in range(len(ids))])
    tokens = at != 0
    third = torch.arange(layers) * 3 // layers
    chosen = torch.ones(layers, dtype=torch.bool)
    if name == NOTHING:
        tokens = torch.zeros_like(tokens)
    elif name.startswith("first 16"):
        tokens = tokens & (within < 16)
    elif name.startswith("the passage"):
        tokens = at == passages[best]
    elif name.endswith("third of layers"):
        chosen = third == ("lowest", "middle", "highest").index(name.split()[0])
    mask = chosen[:, None] & tokens[None]
    nothing = torch.zeros_like(mask)
    return (nothing if name == "values" else mask), (nothing if name == "keys" else mask)


def _most_attended(
    model: BlockModel, context: Context, final: Sequence[int], passages: Sequence[int]
) -> int:
    """Return the index of the passage that the question attends to most."""
    layers = range(len(model.profile.kinds))
    ends = torch.tensor([block.kv.num_tokens for block in context.blocks]).cumsum(0)
    to_blocks = [*attention_to_context(model, context, final, layers=layers).tensor_split(ends)]
    return max(range(len(passages)), key=lambda index: float(to_blocks[passages[index]].sum()))
