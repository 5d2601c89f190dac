"""The oracle: a slow but simple reference implementation of block mode.

The oracle runs one dense forward pass over all tokens of the prompt, with an explicit block mask.
Nothing is stored, moved or merged. With an adapter, the final block attends to each passage's
adapted keys and values, and other tokens attend to the original keys and values. The formula of
``model.correction`` is evaluated block by block in float64, as is attention. State layers run
segment by segment: a segment is a context block with its sink, or the first and the final block
together. No state is stored or set, and no code is shared with ``model.states``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.kv import Positions, RotaryLayout, rotate
from blockattn_rag.model import BlockModel
from blockattn_rag.model.correction import PLACES, Correction
from blockattn_rag.model.kinds import storing
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.sinks import sink_ids as ids_of_sink

_NAME = "blockattn_oracle"


class Layout(NamedTuple):
    """Blocks and positions of a prompt's tokens. Each tensor has one entry per token.

    ``block``: Index of the token's block. A sink belongs to the block that follows it.
    ``position``: Position in the prompt. A sink takes the positions right before its block, and
    does not move the block.
    """

    block: Tensor
    position: Tensor
    is_sink: Tensor


def layout_of(block_lengths: Sequence[int], sink_length: int = 0) -> Layout:
    """Create a layout with a sink before each block except the first and the final block."""
    tokens: list[tuple[int, int, bool]] = []
    start, final = 0, len(block_lengths) - 1
    for number, length in enumerate(block_lengths):
        sink = sink_length if 0 < number < final else 0
        places = range(start - sink, start + length)
        tokens += ((number, place, place < start) for place in places)
        start += length
    block, position, is_sink = map(torch.tensor, zip(*tokens, strict=True))
    return Layout(block, position, is_sink)


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
        window: Sliding window: a token attends to the last ``window`` tokens, including itself.
        sink_length: Number of sink tokens before each block except the first and the final block.
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
    layers: Sequence[int] = (),
    positions: Positions = "reordered",
) -> Tensor:
    """Logits ``[final tokens, vocab]`` of the final block, the last of ``block_ids``, in float32.

    Args:
        sink_ids: Sink tokens before each block except the first and the final block. Only the
            following block attends to them.
        adapter: Adapter of the passages' keys and values, for the final block's attention to them.
        layouts: Rotary layout of each adapter layer.
        layers: Model layer that each adapter layer belongs to. Default: 0, 1, ...
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
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        stack.enter_context(segmented(hf_model, layout.block))
        stack.enter_context(adapting(hf_model, placed, adapter, layouts, layers))
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
    """Generate greedily with one dense forward pass per token. New tokens extend the final block.
    Returns them, with the end token. ``recipe``: Additional arguments for ``oracle_logits``."""
    blocks = [list(block) for block in block_ids]
    new: list[int] = []
    while len(new) < max_new_tokens and not (new and new[-1] in end_ids):
        token = int(oracle_logits(hf_model, blocks, sink_ids, **recipe)[-1].argmax())
        new.append(token)
        blocks[-1].append(token)
    return new


def recipe_arguments(model: BlockModel, recipe: Recipe) -> dict[str, Any]:
    """Arguments of ``oracle_logits`` for a recipe, except its sink."""
    return {
        "adapter": recipe.adapter,
        "layouts": model.profile.layouts,
        "layers": storing(model.profile.kinds),
        "positions": recipe.positions,
    }


class RecipeOracle:
    """Oracle for answers to a prompt with a recipe."""

    def __init__(self, model: BlockModel, prompt: BlockPrompt, recipe: Recipe) -> None:
        if recipe.recompute:
            raise ValueError(f"Unsupported recipe {recipe}: the oracle requires recompute=0")
        self._model = model
        self._sink_ids = ids_of_sink(recipe.sink, model.tokenizer)
        self._arguments = recipe_arguments(model, recipe)
        ids = model.tokenizer.prompt_ids(prompt)
        # Do not use `with_final_ids` to promote passages: the oracle must detect its errors.
        is_passage = [block.is_passage for block in prompt.context]
        stay, promoted = len(ids.context), min(recipe.promote, sum(is_passage))
        while sum(is_passage[stay:]) < promoted:
            stay -= 1
        final = [token for block in (*ids.context[stay:], ids.final) for token in block]
        self.blocks = [*ids.context[:stay], final]

    def logits(self, answer_ids: Sequence[int] = ()) -> Tensor:
        """Logits ``[answer tokens + 1, vocab]`` after the prompt and after each answer token."""
        blocks = [*self.blocks[:-1], [*self.blocks[-1], *answer_ids]]
        found = oracle_logits(self._model.hf_model, blocks, self._sink_ids, **self._arguments)
        return found[-1 - len(answer_ids) :]

    def generate(self, max_new_tokens: int) -> list[int]:
        ends, model = sorted(self._model.end_token_ids), self._model.hf_model
        return oracle_generate(
            model, self.blocks, max_new_tokens, ends, self._sink_ids, **self._arguments
        )


def _masks(hf_model: PreTrainedModel, lengths: Sequence[int], sink_length: int) -> Any:
    """Additive mask ``[1, 1, n, n]``: 0 where a token is visible, else the dtype's minimum. If only
    some layers have a sliding window, returns a mask for each layer type."""
    layers = DynamicCache(config=hf_model.config).layers
    windows = {getattr(layer, "sliding_window", None) for layer in layers}
    lowest = torch.finfo(hf_model.dtype).min
    masks: dict[int | None, Tensor] = {}
    for window in windows:
        hidden = ~block_mask(lengths, window, sink_length)[None, None]
        masks[window] = lowest * hidden.to(hf_model.device, hf_model.dtype)
    if len(windows) == 1:
        return masks.popitem()[1]
    (window,) = windows - {None}
    by_kind: dict[str, Tensor | None] = {
        **dict.fromkeys(("full_attention", "hybrid"), masks[None]),
        **dict.fromkeys(("sliding_attention", "hybrid_sliding"), masks[window]),
    }
    return defaultdict(lambda: None, by_kind)


@contextmanager
def adapting(
    hf_model: PreTrainedModel,
    layout: Layout,
    adapter: Correction | None,
    layouts: Sequence[RotaryLayout],
    layers: Sequence[int],
) -> Iterator[None]:
    """Context manager that replaces the model's attention if there is an adapter, or if its
    implementation is neither eager nor sdpa, and may not support dense masks."""
    before = hf_model.config._attn_implementation
    if adapter is None and before.endswith(("eager", "sdpa")):
        yield
        return
    places = {layer: place for place, layer in enumerate(layers or range(len(layouts)))}
    final = int(layout.block[-1])
    rows = layout.block == final

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **kwargs: Any
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        scale = kwargs.get("scaling") or 1 / math.sqrt(query.shape[-1])

        def attend(key: Tensor, value: Tensor) -> Tensor:
            keys, values = (s.repeat_interleave(groups, dim=1).double() for s in (key, value))
            scores = query.double() @ keys.mT * scale
            if (cap := kwargs.get("softcap")) is not None:
                scores = cap * (scores / cap).tanh()
            scores = scores + mask
            if (sinks := kwargs.get("s_aux")) is not None:  # Attention sinks, one score per head.
                own = sinks.double().reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
                weights = torch.cat([scores, own], dim=-1).softmax(-1)[..., :-1]
            else:
                weights = scores.softmax(-1)
            return weights @ values

        outputs = attend(key, value)
        if adapter is not None:
            layer = places[module.layer_idx]
            adapted = attend(*_adapted(adapter, layer, key, value, layout, layouts[layer]))
            outputs[:, :, rows] = adapted[:, :, rows]
        return outputs.to(query.dtype).transpose(1, 2).contiguous(), None

    AttentionInterface.register(_NAME, attention)
    hf_model.set_attn_implementation(_NAME)
    if hf_model.config._attn_implementation != _NAME:
        raise UnsupportedModelError(
            f"{type(hf_model).__name__} does not use transformers' attention interface, so the "
            "oracle can only check it without an adapter, and with eager or sdpa attention."
        )
    try:
        yield
    finally:
        hf_model.set_attn_implementation(before)


def _adapted(
    adapter: Correction,
    layer: int,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    rotary: RotaryLayout,
) -> tuple[Tensor, Tensor]:
    """Apply the adapter to the passages' keys and values ``[1, K, n, D]``."""
    key, value = (states.to(torch.float64, copy=True) for states in (key, value))
    weight, bias = (tensor.to(key.device, key.dtype) for tensor in adapter.layers[layer])
    for block in range(1, int(layout.block[-1])):
        at = (layout.block == block) & ~layout.is_sink
        offsets = layout.position[at]
        bare = _turned(key[0][:, at], -offsets, rotary)
        states = torch.cat([bare, value[0][:, at]], dim=-1)
        place = [sum(index >= end for end in PLACES) for index in range(states.shape[1])]
        changed = states + states @ weight + bias[:, place]
        new_key, new_value = changed.split([key.shape[-1], value.shape[-1]], dim=-1)
        key[0][:, at], value[0][:, at] = _turned(new_key, offsets, rotary), new_value
    return key, value


def _turned(keys: Tensor, positions: Tensor, rotary: RotaryLayout) -> Tensor:
    if not rotary.rotates:
        return keys
    cos, sin = (table.double() for table in rotary.cos_sin(positions, keys.device))
    return rotate(keys, cos, sin, rotary)


Rows = tuple[Tensor, Tensor]
"""Indices of a segment's tokens, and whether each token's output is kept (bool)."""


def segments(block: Tensor) -> list[Rows]:
    """Split a prompt into segments. ``block`` ``[n]``: Block index of each token."""
    final = int(block[-1])
    found = []
    for number in range(final + 1):
        rows = block == number
        if number == final:
            rows = rows | (block == 0)
        at = rows.nonzero()[:, 0]
        found.append((at, block[at] == number))
    return found


@contextmanager
def segmented(hf_model: PreTrainedModel, block: Tensor) -> Iterator[None]:
    """Run the state layers segment by segment. ``block`` ``[n]``: Block index of each token."""
    parts = [(at.to(hf_model.device), keeps) for at, keeps in segments(block)]
    with ExitStack() as undo:
        for mixer in state_mixers(hf_model):
            original = mixer.forward
            mixer.forward = _segmented_forward(original, parts)
            undo.callback(mixer.__dict__.pop, "forward")
        yield


def _segmented_forward(forward: Callable[..., Any], parts: list[Rows]) -> Callable[..., Any]:
    tokens = sum(int(keeps.sum()) for _, keeps in parts)

    def cut(value: Any, at: Tensor) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(cut(part, at) for part in value)
        has_tokens = isinstance(value, Tensor) and value.dim() > 1
        return value[:, at] if has_tokens and value.shape[1] == tokens else value

    def run(*args: Any, **kwargs: Any) -> Any:
        outputs = []
        for at, _ in parts:
            own = {n: None if "mask" in n else cut(value, at) for n, value in kwargs.items()}
            outputs.append(forward(*(cut(value, at) for value in args), **own))
        if isinstance(outputs[0], Tensor):
            return _joined(outputs, parts, tokens)
        columns = zip(*outputs, strict=True)
        return tuple(
            _joined(column, parts, tokens) if isinstance(column[0], Tensor) else column[0]
            for column in columns
        )

    return run


def _joined(outputs: Sequence[Tensor], parts: list[Rows], tokens: int) -> Tensor:
    """Join the outputs of segments into one tensor for all tokens."""
    lengths = [len(at) for at, _ in parts]
    first = outputs[0]
    dims = range(1, first.dim())
    dim = next(d for d in dims if [output.shape[d] for output in outputs] == lengths)
    joined = first.new_zeros(*first.shape[:dim], tokens, *first.shape[dim + 1 :])
    for output, (at, keeps) in zip(outputs, parts, strict=True):
        joined.index_copy_(dim, at[keeps], output.index_select(dim, keeps.nonzero()[:, 0]))
    return joined


def state_mixers(hf_model: PreTrainedModel) -> list[nn.Module]:
    """Find the outermost modules that update a state in the cache."""
    running: list[nn.Module] = []
    found: list[nn.Module] = []
    layers = DynamicCache(config=hf_model.config).layers
    if not any(hasattr(layer, "conv_states") for layer in layers):
        return found

    class Watch(DynamicCache):
        def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
            found.append(running[-1])
            return super().update_conv_state(*args, **kwargs)

        def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
            found.append(running[-1])
            return super().update_recurrent_state(*args, **kwargs)

    with ExitStack() as undo, torch.no_grad():
        for module in hf_model.modules():
            before = module.register_forward_pre_hook(lambda own, _: running.append(own))
            after = module.register_forward_hook(lambda *_: running.pop() and None)
            undo.callback(before.remove)
            undo.callback(after.remove)
        ids = torch.tensor([[1, 2, 3, 4]], device=hf_model.device)
        hf_model(input_ids=ids, past_key_values=Watch(config=hf_model.config), use_cache=True)
    inside = {id(part) for one in found for part in one.modules() if part is not one}
    return list({id(one): one for one in found if id(one) not in inside}.values())
