"""The oracle: a slow, obvious reference implementation of block mode.

Runs one dense forward over all tokens of the prompt, with an explicit block mask. Nothing is
stored, moved or merged. Imported only by tests and ``check``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from blockattn_rag.check.attention import adapting, layout_of
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.kv.context import Positions
from blockattn_rag.kv.rope import RotaryLayout
from blockattn_rag.model import BlockModel
from blockattn_rag.model.correction import Correction
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.sinks import sink_ids as ids_of_sink


def block_mask(
    block_lengths: Sequence[int], window: int | None = None, sink_length: int = 0
) -> Tensor:
    """Block mask ``[n, n]``, bool: True where the row's token attends to the column's token.

    See Block-Attention, figure 1. Example with two context blocks and a final block of two tokens
    each, without and with a sink ``s``::

            a a b b F F             a a s b b F F
        a   1 . . . . .         a   1 . . . . . .
        a   1 1 . . . .         a   1 1 . . . . .
        b   . . 1 . . .         s   . . 1 . . . .
        b   . . 1 1 . .         b   . . 1 1 . . .
        F   1 1 1 1 1 .         b   . . 1 1 1 . .
        F   1 1 1 1 1 1         F   1 1 . 1 1 1 .
                                F   1 1 . 1 1 1 1

    Args:
        block_lengths: Number of tokens of each block. The last block is the final block.
        window: Size of the sliding window: a token attends to the last ``window`` tokens, including
            itself.
        sink_length: Number of tokens of the sink before each block except the first and the final
            one.
    """
    block, position, is_sink = layout_of(block_lengths, sink_length)
    seen = (block[:, None] == block) | ((block == len(block_lengths) - 1)[:, None] & ~is_sink)
    seen = seen.tril()
    return seen if window is None else seen & (position[:, None] - position < window)


def oracle_logits(
    hf_model: PreTrainedModel,
    block_ids: Sequence[Sequence[int]],
    sink_ids: Sequence[int] = (),
    *,
    adapter: Correction | None = None,
    layouts: Sequence[RotaryLayout] = (),
    positions: Positions = "reordered",
    masses: list[Tensor] | None = None,
) -> Tensor:
    """Logits ``[final tokens, vocab]`` of the final block (the last of ``block_ids``), float32.

    Args:
        block_ids: Token ids of each block.
        sink_ids: Sink tokens before each block except the first and the final one. Only that block
            attends to them.
        adapter: Adapter for the keys and values of passages, which the final block attends to.
        layouts: Rotary layout per layer, for the adapter.
        positions: Positions of the context blocks' keys.
        masses: List to which each layer appends the final block's attention weights.
    """
    lengths = [len(block) for block in block_ids]
    layout = layout_of(lengths, len(sink_ids))
    first, *middle, final = block_ids if len(block_ids) > 1 else ((), *block_ids)
    ids = [*first, *(token for block in middle for token in (*sink_ids, *block)), *final]
    position = layout.position
    if positions == "composite":
        starts = torch.tensor([sum(lengths[:number]) for number in range(len(lengths))])
        is_final = layout.block == len(lengths) - 1
        position = torch.where(is_final, position, position - starts[layout.block])
    is_plain = positions == "reordered" and not layout.is_sink.any()
    placed = layout._replace(position=position)
    with torch.inference_mode(), adapting(hf_model, placed, adapter, layouts, masses):
        out = hf_model(
            input_ids=torch.tensor([ids], device=hf_model.device),
            attention_mask=_masks(hf_model, lengths, len(sink_ids)),
            use_cache=False,
            **({} if is_plain else {"position_ids": position[None].to(hf_model.device)}),
        )
    return out.logits[0, -lengths[-1] :].float()


def oracle_generate(
    hf_model: PreTrainedModel,
    block_ids: Sequence[Sequence[int]],
    max_new_tokens: int,
    end_ids: Sequence[int] = (),
    sink_ids: Sequence[int] = (),
    **recipe: Any,
) -> list[int]:
    """Generate greedily, with one dense forward per token. New tokens extend the final block.

    ``recipe``: Further arguments of ``oracle_logits``.
    """
    blocks = [list(block) for block in block_ids]
    new: list[int] = []
    while len(new) < max_new_tokens and not (new and new[-1] in end_ids):
        token = int(oracle_logits(hf_model, blocks, sink_ids, **recipe)[-1].argmax())
        new.append(token)
        blocks[-1].append(token)
    return new


class RecipeOracle:
    """Oracle for the answer to a prompt with a recipe.

    Args:
        recipe: Recipe that block mode runs with.
    """

    def __init__(self, model: BlockModel, prompt: BlockPrompt, recipe: Recipe) -> None:
        self._hf_model = model.hf_model
        self._end_ids = sorted(model.end_token_ids)
        ids = model.tokenizer.prompt_ids(prompt)
        self._arguments: dict[str, Any] = {
            "sink_ids": ids_of_sink(recipe.sink, model.tokenizer),
            "adapter": recipe.adapter,
            "layouts": model.profile.layouts,
            "positions": recipe.positions,
        }
        self.blocks = [*ids.context, ids.final]
        passages = [place for place, block in enumerate(prompt.context) if block.is_passage]
        best = self._most_attended(passages)[: recipe.promote] if recipe.promote else []
        if best:
            stay = [block for place, block in enumerate(prompt.context) if place not in best]
            moved = [prompt.context[place] for place in reversed(best)]
            rest = model.tokenizer.prompt_ids(BlockPrompt((*stay, *moved), prompt.final))
            context = [*rest.context, rest.final]
            promoted = [token for block in context[len(stay) :] for token in block]
            self.blocks = [*context[: len(stay)], promoted]

    def logits(self, answer_ids: Sequence[int] = ()) -> Tensor:
        """Logits ``[answer tokens + 1, vocab]`` after the prompt and after each answer token."""
        blocks = [*self.blocks[:-1], [*self.blocks[-1], *answer_ids]]
        found = oracle_logits(self._hf_model, blocks, **self._arguments)
        return found[-1 - len(answer_ids) :]

    def generate(self, max_new_tokens: int) -> list[int]:
        """Generate the answer greedily."""
        return oracle_generate(
            self._hf_model, self.blocks, max_new_tokens, self._end_ids, **self._arguments
        )

    def _most_attended(self, passages: Sequence[int]) -> list[int]:
        """Indices of passages, sorted by how much the question attends to each, most first: the
        share of the attention to the context, averaged over layers, heads and query tokens."""
        if not passages:
            return []
        masses: list[Tensor] = []
        oracle_logits(self._hf_model, self.blocks, masses=masses, **self._arguments)
        sink_length = len(self._arguments["sink_ids"])
        layout = layout_of([len(block) for block in self.blocks], sink_length)
        weights = torch.stack(masses)  # [layers, heads, question, tokens]
        places = [(layout.block == at) & ~layout.is_sink for at in range(len(self.blocks) - 1)]
        shares = torch.stack([weights[..., place].sum(-1) for place in places])
        means = (shares / shares.sum(0)).flatten(1).mean(1).tolist()
        return sorted(passages, key=lambda place: -means[place])


def _masks(hf_model: PreTrainedModel, lengths: Sequence[int], sink_length: int) -> Any:
    """Mask in the form the model expects: one for all layers, or one per layer type."""
    layers = DynamicCache(config=hf_model.config).layers
    windows = {getattr(layer, "sliding_window", None) for layer in layers}
    masks = {w: _additive(block_mask(lengths, w, sink_length), hf_model) for w in windows}
    if len(windows) == 1:
        return masks.popitem()[1]
    (window,) = windows - {None}
    return {"full_attention": masks[None], "sliding_attention": masks[window]}


def _additive(mask: Tensor, hf_model: PreTrainedModel) -> Tensor:
    """Additive mask ``[1, 1, n, n]``: 0 where a token is visible, else the dtype's minimum."""
    bias = torch.zeros(1, 1, *mask.shape, dtype=hf_model.dtype)
    return bias.masked_fill_(~mask, torch.finfo(hf_model.dtype).min).to(hf_model.device)
