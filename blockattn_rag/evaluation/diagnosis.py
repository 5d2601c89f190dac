"""Diagnosis: what of block mode's divergence comes from which keys and values of the context.

Block mode differs from full mode in the keys and values of its context alone. Here parts of full
mode's are swapped in, and what divergence is left is measured as in :mod:`.fidelity`: what a repair
of that part alone can hope for. It is no strict bound: parts that were computed in different ways
may fit each other worse than neither (all values alone do), and a repair may aim at answers instead
of at full mode's states.

    keys, values             all keys, or all values
    first-N                  keys and values of the first N tokens of each block
    layers<L, layers>=L      keys and values of the layers before L, or from L on; counted from 0
    keys A-B, values A-B     all keys, or all values, of the layers A to B alone
    first-16 A-B             keys and values of the first 16 tokens there
    floor                    all of them
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.evaluation.datasets import EvaluationSample
from blockattn_rag.evaluation.fidelity import (
    FLOOR,
    FidelityRecord,
    FidelityReport,
    as_one_block,
    compare_each,
    full_answer,
    shown_samples,
)
from blockattn_rag.evaluation.run import make_prompt
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import assemble, place
from blockattn_rag.model import BlockModel, EncodeRequest
from blockattn_rag.prompts.checkpoints import AUTO, format_for
from blockattn_rag.prompts.formats import PromptFormat
from blockattn_rag.prompts.sinks import FIRST_BLOCK, NO_SINK, check_sink, sink_ids

FIRST_TOKENS = (1, 4, 16, 32)
_SLICES = 6  # of the layers, as many or fewer
_FIRST_BY_LAYER = 16


class Part(NamedTuple):
    """Which keys and values come from full mode: of these layers, and of the first tokens of each
    block."""

    layers: range
    keys: bool = True
    values: bool = True
    first_tokens: int = sys.maxsize


def parts_of(num_layers: int) -> dict[str, Part]:
    """The parts that are swapped in, by name, for a model of that many layers."""
    every = range(num_layers)
    cuts = sorted({num_layers * i // _SLICES for i in range(1, _SLICES)} - {0})
    return {
        "block": Part(range(0)),
        "keys": Part(every, values=False),
        "values": Part(every, keys=False),
        **{f"first-{n}": Part(every, first_tokens=n) for n in FIRST_TOKENS},
        **{f"layers<{cut}": Part(every[:cut]) for cut in cuts},
        **{f"layers>={cut}": Part(every[cut:]) for cut in cuts},
        **{
            name: part for each in pairwise([0, *cuts, num_layers]) for name, part in _within(*each)
        },
        FLOOR: Part(every),
    }


def _within(start: int, end: int) -> Iterator[tuple[str, Part]]:
    """The parts of a slice of the layers."""
    layers = range(start, end)
    where = f"{start}-{end - 1}"
    yield f"keys {where}", Part(layers, values=False)
    yield f"values {where}", Part(layers, keys=False)
    yield f"first-{_FIRST_BY_LAYER} {where}", Part(layers, first_tokens=_FIRST_BY_LAYER)


def diagnose(
    engine: BlockAttentionEngine,
    samples: Sequence[EvaluationSample],
    *,
    sink: str = NO_SINK,
    prompt: str | PromptFormat = AUTO,
    num_passages: int | None = None,
    max_new_tokens: int = 24,
    records_path: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> FidelityReport:
    """Swap each part of full mode's keys and values into block mode's on every sample.

    Args:
        engine: the model; its store is not used.
        samples: as for :func:`.fidelity.measure_fidelity`; each with a passage.
        sink: what blocks are encoded after in block mode; see ``prompts.sinks``.
        prompt, num_passages, max_new_tokens, records_path, settings, on_progress: as for
            :func:`.fidelity.measure_fidelity`.

    Returns:
        A report whose modes are the names of :func:`parts_of`, and whose ``settings`` hold
        ``num_layers``.

    Raises:
        ValueError: an unknown sink or prompt format, no sample, or one without passages.
        DataError: ``records_path`` holds records of another measurement, or is no record file.
        ContextOverflowError: a prompt does not fit in the context window.
    """
    model, form = engine.model, format_for(prompt, engine.model.name)
    parts = parts_of(len(model.profile.layouts))
    shown = shown_samples(samples, num_passages)
    if bare := [sample.id for sample in shown if not sample.passages]:
        raise ValueError(
            f"the sample {bare[0]!r} has no passages, so block mode is full mode there; leave it "
            "out"
        )
    noted = {
        **(settings or {}),
        "measured": "diagnosis",
        "fingerprint": model.fingerprint,
        "prompt_format": form.name,
        "num_passages": num_passages,
        "max_new_tokens": max_new_tokens,
        "sink": check_sink(sink),
        "num_layers": len(model.profile.layouts),
    }

    def compare(sample: EvaluationSample, missing: Sequence[str]) -> list[FidelityRecord]:
        made = make_prompt(engine, form, sample, "full")
        answer, expected = full_answer(engine, made, max_new_tokens)
        ids = model.tokenizer.prompt_ids(made)
        states = ContextStates(model, ids.context, sink)
        records = []
        for name in missing:
            cache = model.cache_for(place([states.swapped(parts[name])]))
            logits = model.answer_logits(states.token_ids, ids.final, answer, cache)
            records.append(FidelityRecord.compared(sample, name, logits, expected))
        return records

    return compare_each(shown, list(parts), compare, noted, records_path, on_progress)


class ContextStates:
    """Keys and values of one context as full mode and as block mode computes them.

    Args:
        model: the model.
        context: token ids of the context blocks, at least one.
        sink: what blocks but the first are encoded after.
    """

    def __init__(self, model: BlockModel, context: Sequence[list[int]], sink: str) -> None:
        self.token_ids = [token for block in context for token in block]
        self._full = as_one_block(model, self.token_ids)
        before = context[0] if sink == FIRST_BLOCK else sink_ids(sink, model.tokenizer)
        requests = [
            EncodeRequest(ids, str(index), "", before if index else ())
            for index, ids in enumerate(context)
        ]
        encoded = {kv.digest: kv for batch in model.encode(requests) for kv in batch}
        blocks = [encoded[request.digest] for request in requests]
        self._block = list(assemble(place(blocks), model.profile.layouts))
        offsets = torch.cat([torch.arange(len(ids)) for ids in context])
        self._offsets = offsets[:, None].to(model.device)  # of each token in its block

    def swapped(self, part: Part) -> BlockKV:
        """The context as one block: full mode's states in ``part``, block mode's elsewhere."""
        keys, values = [], []
        for layer, (block_keys, block_values) in enumerate(self._block):
            full_keys, full_values = self._full.states(layer)
            swaps = layer in part.layers
            keys.append(self._mixed(part, swaps and part.keys, full_keys, block_keys))
            values.append(self._mixed(part, swaps and part.values, full_values, block_values))
        return replace(self._full, keys=tuple(keys), values=tuple(values))

    def _mixed(self, part: Part, swaps: bool, full: Tensor, block: Tensor) -> Tensor:
        return torch.where(self._offsets < part.first_tokens, full, block) if swaps else block
