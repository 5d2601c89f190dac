"""Model check: compares a model's block mode with the oracle, and with full attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from blockattn_rag.check.oracle import oracle_generate, oracle_logits, recipe_arguments
from blockattn_rag.engine.fetcher import PLAIN
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.kv import Context, place, relative_error
from blockattn_rag.model.block_model import BlockModel
from blockattn_rag.model.encoding import EncodeRequest
from blockattn_rag.model.kinds import summary
from blockattn_rag.model.probe import LOGITS, LOGITS_OF_OTHER_DTYPES, vocabulary_size
from blockattn_rag.model.recompute import recompute
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.prompts.blocks import Block
from blockattn_rag.prompts.sinks import sink_ids

# Tokens in each context block (one has a single token), and in the final block.
_BLOCK_TOKENS = (24, 1, 17, 12)
_SINK_TOKENS = 4
_NEW_TOKENS = 8
_EXACT = (torch.float32, torch.float64)
_MARGIN = 2
"""Budget in multiples of the rounding error. Exact block mode stays below 1."""
_BOUNDARY_TEXT = "Halden Tower is 214 metres tall.\n\nIt was built in 1931."


@dataclass(frozen=True, slots=True)
class CheckRow:
    """Result of one check. ``value``: Measured value, if any. ``budget``: Its maximum, if any."""

    name: str
    passed: bool
    value: float | None
    budget: float | None
    detail: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Results of all checks of one model."""

    model: str
    rows: tuple[CheckRow, ...]

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)


def check_model(model: BlockModel, recipe: Recipe | None = None) -> CheckReport:
    """Run every check on a loaded model.

    In float32 and float64, the relative error of logits must not exceed 1e-4. For 16-bit types, the
    budget is twice the model's rounding error (the change in full attention's logits when each
    embedding changes by one rounding step), within the limits of ``probe.LOGITS``. With a
    ``recipe``, block mode is also checked with it.
    """
    generator, vocabulary = torch.Generator().manual_seed(1), vocabulary_size(model.hf_model)
    blocks: list[list[int]] = [
        torch.randint(vocabulary, (tokens,), generator=generator).tolist()
        for tokens in _BLOCK_TOKENS
    ]
    budget = LOGITS.get(model.dtype, LOGITS_OF_OTHER_DTYPES)
    if model.dtype not in _EXACT:
        budget = min(max(LOGITS[torch.float32], _MARGIN * _rounding_error(model, blocks)), budget)
    first, final = blocks[0], blocks[-1]
    one = placed_context(model, [first])
    errors = {
        "one block = full attention": _full_error(model, [first, final], one),
        "assembled = oracle": _oracle_error(model, blocks),
        "same block twice = oracle": _oracle_error(model, [first, first, final]),
        "other order = oracle": _oracle_error(model, [*blocks[-2::-1], final]),
        "blocks after a sink = oracle": _oracle_error(model, blocks, first[:_SINK_TOKENS]),
    }
    if recipe is not None:
        sink = sink_ids(recipe.sink, model.tokenizer)
        errors[f"recipe {recipe} = oracle"] = _oracle_error(model, blocks, sink, recipe)
        if recipe.recompute:
            placed = placed_context(model, blocks[:-1], sink, recipe)
            may_change = [False, *[True] * (len(blocks) - 2)]
            with model.lock:
                recomputed, _ = recompute(model, placed, may_change, final, 1.0)
            name = "all tokens recomputed = full attention"
            errors[name] = _full_error(model, blocks, recomputed)
    detail = "relative error of the logits"
    rows = [
        _layout_row(model),
        *(CheckRow(name, error <= budget, error, budget, detail) for name, error in errors.items()),
        _greedy_row(model, blocks),
        _boundary_row(model),
    ]
    return CheckReport(model.name, tuple(rows))


def _layout_row(model: BlockModel) -> CheckRow:
    profile = model.profile
    kinds = {(layout.pairing, layout.rotary_dim) for layout in profile.layouts}
    kind = ", ".join(f"{pairing} x {dim}" if dim else "none" for pairing, dim in sorted(kinds))
    size = f"{model.bytes_per_token:,} bytes per token"
    detail = f"{summary(profile.kinds)}; rotation: {kind}; {size}"
    return CheckRow("layers", True, max(profile.key_error, profile.value_error), None, detail)


def placed_context(
    model: BlockModel, blocks: list[list[int]], sink: Sequence[int] = (), recipe: Recipe = PLAIN
) -> Context:
    """Encode blocks of token ids, and place them in order with the recipe's positions. ``sink``
    (token ids) and the recipe's adapter apply to all blocks except the first."""
    sinks = [sink if index else () for index in range(len(blocks))]
    requests = [
        EncodeRequest(ids, f"{ids}, {before}", "", before)
        for ids, before in zip(blocks, sinks, strict=True)
    ]
    encoded = {kv.digest: kv for batch in model.encode(requests) for kv in batch}
    context = [encoded[request.digest] for request in requests]
    if recipe.adapter is not None:
        layouts = model.profile.layouts
        context[1:] = [recipe.adapter.corrected(kv, layouts) for kv in context[1:]]
    return place(context, recipe.positions)


def _full_error(model: BlockModel, blocks: list[list[int]], context: Context) -> float:
    """Relative error of the final block's logits, compared with full attention."""
    return relative_error(_block_logits(model, context, blocks[-1]), _full_logits(model, blocks))


def _oracle_error(
    model: BlockModel, blocks: list[list[int]], sink: Sequence[int] = (), recipe: Recipe = PLAIN
) -> float:
    """Relative error of the final block's logits, compared with the oracle. Checks the recipe's
    adapter and positions, but not promotion, which only moves passages into the final block."""
    found = _block_logits(model, placed_context(model, blocks[:-1], sink, recipe), blocks[-1])
    expected = oracle_logits(model.hf_model, blocks, sink, **recipe_arguments(model, recipe))
    return relative_error(found, expected)


def _full_logits(model: BlockModel, blocks: list[list[int]]) -> Tensor:
    """Logits of full attention after each token of the final block."""
    *others, (first, *rest) = blocks
    return model.answer_logits([*chain(*others)], [first], [*rest, 0]).float()


def _block_logits(model: BlockModel, context: Context, final_ids: list[int]) -> Tensor:
    """Block-mode logits after each token of the final block. The added 0 is a placeholder for the
    predicted token, which the model does not process."""
    first, *others = final_ids
    return model.answer_logits((), [first], [*others, 0], model.cache_for(context)).float()


def _rounding_error(model: BlockModel, blocks: list[list[int]]) -> float:
    """Change in full attention's logits when each embedding changes by one rounding step.

    Does not use block-mode code, so that a bug there cannot raise the budget. Comparing two forward
    passes that are equal in exact arithmetic would not work: some kernels round both alike.
    """

    def change(_: nn.Module, __: object, states: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(2)
        signs = torch.randint(2, states.shape, generator=generator).to(states.device) * 2 - 1
        return (states.float() * (1 + signs * torch.finfo(model.dtype).eps)).to(states.dtype)

    embedding: nn.Module = model.hf_model.get_input_embeddings()
    with model.lock:  # Other threads must not use the changed embeddings.
        expected = _full_logits(model, blocks)
        hook = embedding.register_forward_hook(change)
        try:
            found = _full_logits(model, blocks)
        finally:
            hook.remove()
    return relative_error(found, expected)


def _greedy_row(model: BlockModel, blocks: list[list[int]]) -> CheckRow:
    context = placed_context(model, blocks[:-1])
    options, cache = Sampling(max_new_tokens=_NEW_TOKENS), model.cache_for(context)
    found = model.generate(context.token_ids, blocks[-1], options, cache=cache)
    expected = oracle_generate(model.hf_model, blocks, _NEW_TOKENS, sorted(model.end_token_ids))
    same = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), -1)
    equal = found == expected
    # In 16-bit types, rounding may reorder nearly equal logits, so only their error is checked.
    passed = equal or model.dtype not in _EXACT
    detail = f"{len(found)} tokens" if equal else f"first difference at token {same}"
    return CheckRow("greedy tokens = oracle", passed, float(not equal), 0.0, detail)


def _boundary_row(model: BlockModel) -> CheckRow:
    """Check whether decoding a block's tokens restores its text, ignoring outer white space."""
    block = Block(_BOUNDARY_TEXT)
    ids = model.tokenizer.block_ids(block, first=False)
    decode: Callable[..., str] = model.tokenizer.tokenizer.decode
    text = decode(ids, clean_up_tokenization_spaces=False)
    lost = float(text.strip() != block.text.strip())
    detail = f"{len(ids)} tokens decoded"
    return CheckRow("tokenizer boundary", not lost, lost, 0.0, detail)
