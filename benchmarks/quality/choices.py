"""Comparison of sinks and of criteria for selecting the tokens to recompute, by divergence.

The package's defaults were chosen from these candidates, on questions from the tune file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from diagnosis import joined
from rows import divergence
from sets import Item
from tables import markdown
from torch import Tensor

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.check.model import placed_context
from blockattn_rag.kv.context import Context, place
from blockattn_rag.lab.evaluation.fidelity import full_answer
from blockattn_rag.lab.evaluation.metrics import bootstrap_mean, bootstrap_ratio
from blockattn_rag.model import BlockModel, EncodeRequest
from blockattn_rag.model.recompute import (
    attention_to_context,
    can_recompute,
    choose_tokens,
    with_recomputed,
)
from blockattn_rag.prompts.blocks import Span
from blockattn_rag.prompts.chat_template import Message, chat_spans, has_chat_template
from blockattn_rag.prompts.formats import CHAT, PromptFormat
from blockattn_rag.prompts.sinks import sink_ids
from blockattn_rag.prompts.tokenization import BlockTokenizer

BLOCK = "none"
SHORT = "short head"
"""Sink with a one-line system message, up to the start of the user message."""

OWN = "the prompt's head"
"""Sink that consists of the prompt's first block. It depends on the system prompt."""

_SHORT_SYSTEM = "You are a helpful assistant."

OTHER_SYSTEM = (
    "Use the following pieces of context to answer the question at the end. If you don't know the "
    "answer, just say that you don't know, don't try to make up an answer."
)
"""The system prompt of every third question."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Result of a candidate on a question. For ``kl`` and ``agreement``, see
    ``lab.evaluation.fidelity``."""

    set: str
    id: str
    candidate: str
    kl: float
    agreement: float
    tokens: int

    @property
    def name(self) -> str:
        return self.candidate


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sink, and a share of tokens to recompute.

    Args:
        first_share: Share of these tokens that are the first tokens of passages, except the first
            passage. The others are the tokens with the most attention in the last layers.
        layers: Start and end of these layers, as shares of all layers.
        recomputed: Start and end of the layers in which tokens are recomputed. They start from the
            hidden states of block mode, which would have to be stored.
        measured: Context in which attention is measured: block mode's, the one after a first
            recomputation, or full mode's, which is unknown in practice.
    """

    sink: str
    share: float = 0.0
    layers: tuple[float, float] = (2 / 3, 1)
    first_share: float = 0.0
    recomputed: tuple[float, float] = (0, 1)
    measured: Literal["block", "recomputed", "full"] = "block"


_SINKS = (BLOCK, "head:4", "head", SHORT, OWN)
CANDIDATES = {
    **{sink: Candidate(sink) for sink in _SINKS},
    **{f"{sink}, 10 %": Candidate(sink, 0.1) for sink in _SINKS},
    "none, 5 %": Candidate(BLOCK, 0.05),
    "head, 10 % by all layers": Candidate("head", 0.1, layers=(0, 1)),
    "none, 10 % by all layers": Candidate(BLOCK, 0.1, layers=(0, 1)),
    "none, 10 % by the last half": Candidate(BLOCK, 0.1, layers=(1 / 2, 1)),
    "none, 10 %, half of them first tokens": Candidate(BLOCK, 0.1, first_share=0.5),
    "none, 10 %, a quarter of them first tokens": Candidate(BLOCK, 0.1, first_share=0.25),
    "none, 5 %, half of them first tokens": Candidate(BLOCK, 0.05, first_share=0.5),
    "none, 10 %, all of them first tokens": Candidate(BLOCK, 0.1, first_share=1.0),
    "head, 20 %": Candidate("head", 0.2),
    "head, 30 %": Candidate("head", 0.3),
    "head, 10 % by the middle third": Candidate("head", 0.1, layers=(1 / 3, 2 / 3)),
    "head, 10 %, selected twice": Candidate("head", 0.1, measured="recomputed"),
    "head, 10 % by full mode's attention": Candidate("head", 0.1, measured="full"),
    "head, 15 % in the lower two thirds": Candidate("head", 0.15, recomputed=(0, 2 / 3)),
    "head, 15 % in the upper two thirds": Candidate("head", 0.15, recomputed=(1 / 3, 1)),
    "head, 30 % in the middle third": Candidate("head", 0.3, recomputed=(1 / 3, 2 / 3)),
}
"""Candidates by name. By default, tokens are selected by the last third of the layers."""


def names_for(model: BlockModel) -> list[str]:
    """Return the names of the candidates that a model supports."""
    return [name for name, one in CANDIDATES.items() if can_recompute(model) or not one.share]


def compare(
    engine: BlockAttentionEngine,
    form: PromptFormat,
    max_new_tokens: int,
    item: Item,
    names: Sequence[str],
) -> Iterator[Choice]:
    """Yield the results of candidates on a question."""
    model = engine.model
    if form is CHAT and sum(item.id.encode()) % 3 == 0:
        form = replace(form, system=OTHER_SYSTEM)
    prompt = form.prompt(item.question, item.passages, model.tokenizer.tokenizer)
    answer, expected = full_answer(engine, prompt, max_new_tokens)
    ids = model.tokenizer.prompt_ids(prompt)
    encoded: dict[str, tuple[Sequence[int], Context]] = {}
    for name in names:
        candidate = CANDIDATES[name]
        if (sink := candidate.sink) not in encoded:
            before = ids.context[0] if sink == OWN else _sink(sink, model.tokenizer)
            encoded[sink] = before, placed_context(model, ids.context, before)
        before, base = encoded[sink]
        context, chosen = base, list[int]()
        if candidate.share:
            recomputed = partial(partly_recomputed, model, base, ids.context, before)
            select = partial(_chosen, model, lengths=base.lengths, final=ids.final)
            if candidate.measured == "recomputed":
                context = recomputed(select(base, candidate=candidate), candidate)
            elif candidate.measured == "full":
                context = recomputed(range(base.lengths[0], base.num_tokens), candidate)
            chosen = select(context, candidate=candidate)
            context = recomputed(chosen, candidate)
        cache = model.cache_for(context)
        logits = model.answer_logits(context.token_ids, ids.final, answer, cache)
        yield Choice(item.set, item.id, name, *divergence(logits, expected), len(chosen))


def _sink(name: str, tokenizer: BlockTokenizer) -> list[int]:
    """Return the token ids of a sink."""
    if name != SHORT:
        return sink_ids(name, tokenizer)
    if not has_chat_template(tokenizer.tokenizer):
        return tokenizer.final_ids(f"{_SHORT_SYSTEM}\n\n", first=True)
    user = Span("?", "conversation")
    system = (Span(_SHORT_SYSTEM, "system"),)
    turns: list[Message] = [
        {"role": "system", "content": system},
        {"role": "user", "content": (user,)},
    ]
    spans = chat_spans(tokenizer.tokenizer, turns)
    return tokenizer.final_ids(spans[: spans.index(user)], first=True)


def _chosen(
    model: BlockModel,
    context: Context,
    *,
    lengths: Sequence[int],
    final: Sequence[int],
    candidate: Candidate,
) -> list[int]:
    """Return the indices of the tokens that a candidate recomputes.

    ``lengths``: Number of tokens of each block, of which a recomputed context has only one.
    """
    count = round(candidate.share * sum(lengths[1:]))
    first = _first_tokens(lengths, round(candidate.first_share * count))
    with model.lock:
        layers = _range(model, candidate.layers)
        received = attention_to_context(model, context, final, layers=layers)
    received[first] = torch.inf
    return choose_tokens(received, lengths, [False] + [True] * (len(lengths) - 1), count)


def _range(model: BlockModel, shares: tuple[float, float]) -> range:
    """Return the indices of layers from shares of all layers."""
    first, end = (int(share * len(model.profile.kinds)) for share in shares)
    return range(first, end)


def partly_recomputed(
    model: BlockModel,
    context: Context,
    blocks: Sequence[list[int]],
    sink: Sequence[int],
    chosen: Sequence[int],
    candidate: Candidate,
) -> Context:
    """Recompute tokens in a candidate's layers; the other layers keep block mode's keys and
    values."""
    if not chosen:
        return context
    layers = _range(model, candidate.recomputed)
    with model.lock, _starting_at(model, layers.start, blocks, sink, chosen):
        (block,) = with_recomputed(model, context, chosen).blocks
    ours, theirs = block.kv, joined(model, context, block.kv)
    sources = [ours if at in layers else theirs for at in range(len(ours.keys))]
    keys = tuple(source.keys[at] for at, source in enumerate(sources))
    values = tuple(source.values[at] for at, source in enumerate(sources))
    return place([replace(ours, keys=keys, values=values)])


@contextmanager
def _starting_at(
    model: BlockModel,
    layer: int,
    blocks: Sequence[list[int]],
    sink: Sequence[int],
    chosen: Sequence[int],
) -> Iterator[None]:
    """Replace the chosen tokens' input to a layer with their hidden states in block mode."""
    if not layer:
        yield
        return
    decoder: Any = model.hf_model.get_decoder()
    states: list[Tensor] = []
    with decoder.layers[layer].register_forward_pre_hook(lambda _, args: states.append(args[0])):
        for index, ids in enumerate(blocks):
            before = sink if index else ()
            [*model.encode([EncodeRequest(ids, f"{ids}, {before}", "", before)])]
    kept = [state[0, -len(ids) :] for state, ids in zip(states, blocks, strict=True)]
    given = torch.cat(kept)[None, [*chosen]]
    with decoder.layers[layer].register_forward_pre_hook(lambda _, args: (given, *args[1:])):
        yield


def _first_tokens(lengths: Sequence[int], count: int) -> list[int]:
    """Return the indices of first tokens, the same number for each passage except the first
    passage."""
    starts = [sum(lengths[:place]) for place in range(2, len(lengths))]
    each = count // max(1, len(starts))
    return [*chain.from_iterable(range(at, at + each) for at in starts)]


def choices_table(records: Sequence[Choice]) -> str:
    """Format the divergence of each candidate, and the recovered share of block mode's divergence,
    best first."""
    by_name: dict[str, dict[tuple[str, str], Choice]] = {}
    for one in records:
        by_name.setdefault(one.candidate, {})[one.set, one.id] = one
    base = by_name[BLOCK]

    def mean(values: dict[tuple[str, str], Choice], of: Callable[[Choice], float]) -> float:
        return sum(map(of, values.values())) / len(values)

    lines = []
    for name, found in sorted(by_name.items(), key=lambda one: mean(one[1], lambda x: x.kl)):
        gained = [base[key].kl - one.kl for key, one in found.items()]
        share = bootstrap_ratio(gained, [base[key].kl for key in found])
        kl = bootstrap_mean([one.kl for one in found.values()])
        lines.append(
            [
                name,
                str(len(found)),
                "{:.3f} ({:.3f} to {:.3f})".format(*kl),
                "-" if name == BLOCK else "{:.0%} ({:.0%} to {:.0%})".format(*share),
                f"{mean(found, lambda x: x.agreement):.1%}",
                f"{mean(found, lambda x: x.tokens):.0f}",
            ]
        )
    head = ["sink, tokens recomputed", "questions", "KL (95 %)", "recovered (95 %)", "agreement"]
    return markdown([*head, "tokens recomputed"], lines)
