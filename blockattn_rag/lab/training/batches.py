"""Batches of encoded samples: padding, token layout, block mask and loss.

Token *i* may attend to token *j* if *j* does not come after *i*, and *i* is in the same block as
*j* or in the final block (Block-Attention, arXiv 2409.15355, figure 1). In full mode, the final
block is the only block. Only the sink itself and the block that follows it attend to a sink.
``check.oracle.block_mask`` shows masks with and without a sink.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from blockattn_rag.engine.results import Mode
from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.kv.context import Positions
from blockattn_rag.lab.training.data import IGNORED

FINAL = 0
"""Block number of the final block and of padding after it."""


class TokenLayout(NamedTuple):
    """Block, place and position of each token, as int64 ``[batch, tokens]``.

    Args:
        block: 1, 2, ... for context blocks; 0 for the final block; -2, -3, ... for the sink of
            block 2, 3, ....
        place: 0, 1, 2, ... in the sample. A sink does not shift places: it occupies the places
            directly before its block, which are negative if it is longer than the preceding text.
            Sliding windows are measured in places.
        position_ids: Position ids that are passed to the model.
    """

    block: Tensor
    place: Tensor
    position_ids: Tensor


def layout_mask(layout: TokenLayout, *, window: int | None = None) -> Tensor:
    """Create a bool mask ``[batch, 1, tokens, tokens]``, True where attention is allowed.
    ``window``: Sliding window in places, including the token itself."""
    block, place = layout.block[:, None], layout.place[:, None]
    query, key = block[..., :, None], block[..., None, :]
    same_block = query.abs() == key.abs()  # A sink's number is the negative of its block's.
    by_final = (query == FINAL) & (key >= 0)
    allowed = torch.tril(same_block | by_final)
    if window is None:
        return allowed
    return allowed & (place[..., :, None] - place[..., None, :] < window)


class ModelMasks:
    """Function that converts a ``TokenLayout`` to the ``attention_mask`` of a transformers model
    with ``"eager"`` or ``"sdpa"`` attention.

    Windows are applied here, because models pass a four-dimensional mask unchanged to all layers,
    even to sliding-window layers. A model with several layer types accepts one mask per type.
    """

    def __init__(self, config: Any, implementation: str) -> None:
        self._is_eager = implementation == "eager"
        # Multimodal models have a separate text config.
        config = config.get_text_config(decoder=True)
        window = getattr(config, "sliding_window", None)
        default = "sliding_attention" if window else "full_attention"
        kinds = sorted(set(getattr(config, "layer_types", None) or [default]))
        known = {"full_attention": None, "sliding_attention": window}
        if unknown := set(kinds) - known.keys():
            raise UnsupportedModelError(
                f"Unsupported layers of type {', '.join(sorted(unknown))}: only full and "
                "sliding-window attention can be trained with a block mask"
            )
        if getattr(config, "use_bidirectional_attention", False):
            raise UnsupportedModelError(
                "The model has bidirectional attention, expected causal attention"
            )
        self._windows = {kind: known[kind] for kind in kinds}

    def __call__(self, layout: TokenLayout, dtype: torch.dtype) -> Any:
        masks = {kind: layout_mask(layout, window=window) for kind, window in self._windows.items()}
        if self._is_eager:  # Eager attention adds the mask to the scores.
            lowest = torch.finfo(dtype).min
            masks = {kind: lowest * (~mask).to(dtype) for kind, mask in masks.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))


Item = Mapping[str, list[int]]
"""Sample in one mode: ``input_ids``, ``labels``, and the fields of a ``TokenLayout``."""


@dataclass(frozen=True, eq=False)
class ModeDataset(Dataset[Item]):
    """Dataset with each sample once per mode.

    Args:
        samples: A ``datasets.Dataset`` whose columns are the fields of ``EncodedSample``.
        positions: ``"reordered"``: blocks have the positions of their places in the prompt.
            ``"composite"`` (TurboRAG's name for this ablation): each context block starts at
            position 0, and the final block starts after the total length of the context.
        sink: Token ids before each block in block mode, except the first and the final one.
    """

    samples: Any
    modes: Sequence[Mode]
    positions: Positions = "reordered"
    sink: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.samples) * len(self.modes)

    def __getitem__(self, index: int) -> Item:
        sample = self.samples[index // len(self.modes)]
        ids, labels, blocks = (sample[name] for name in ("input_ids", "labels", "block_lengths"))
        if self.modes[index % len(self.modes)] == "full":
            blocks = [sum(blocks)]
        names = ("input_ids", "labels", *TokenLayout._fields)
        item: dict[str, list[int]] = {name: [] for name in names}
        start, last = 0, len(blocks) - 1
        for at, length in enumerate(blocks):
            sink = list(self.sink) if 0 < at < last else []
            end = start + length
            places = range(start - len(sink), end)
            # With "composite", each context block starts at position 0.
            shift = start if self.positions == "composite" and at != last else 0
            number = FINAL if at == last else at + 1
            item["input_ids"] += sink + ids[start:end]
            item["labels"] += [IGNORED] * len(sink) + labels[start:end]
            item["block"] += [-number] * len(sink) + [number] * length
            item["place"] += places
            item["position_ids"] += [place - shift for place in places]
            start = end
        return item

    def token_counts(self) -> list[int]:
        """Return the number of tokens of each item, including sinks, without creating the items."""
        counts = []
        for blocks in self.samples["block_lengths"]:
            own = sum(blocks)
            sinks = len(self.sink) * max(0, len(blocks) - 2)
            counts += [own + sinks if mode == "block" else own for mode in self.modes]
        return counts


@dataclass(frozen=True, slots=True)
class Collator:
    """Function that joins items into a batch of tensors ``[samples, tokens]``. Padding is at the
    end, so with causal attention, no real token attends to it."""

    pad_token_id: int

    def __call__(self, items: Sequence[Item]) -> dict[str, Tensor]:
        fillers = {"input_ids": self.pad_token_id, "labels": IGNORED}
        return {
            name: pad_sequence(
                [torch.tensor(item[name]) for item in items],
                batch_first=True,
                padding_value=fillers.get(name, 0),
            )
            for name in items[0]
        }


def batch_loss(
    masks: ModelMasks, dtype: torch.dtype, model: Any, batch: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Compute the summed cross-entropy of a batch's labels, and their number. Logits are computed
    only at positions where a sample has a label. With long contexts and large vocabularies, the
    logits of all positions would be the largest tensor in the step."""
    labels = batch["labels"][:, 1:]  # Each label is predicted from the tokens before it.
    columns = (labels != IGNORED).any(dim=0).nonzero().flatten()
    logits = model(
        input_ids=batch["input_ids"],
        attention_mask=masks(TokenLayout(*(batch[name] for name in TokenLayout._fields)), dtype),
        position_ids=batch["position_ids"],
        use_cache=False,
        logits_to_keep=columns,
    ).logits
    total = F.cross_entropy(
        logits.flatten(0, 1).float(), labels[:, columns].flatten(), reduction="sum"
    )
    return total, (batch["labels"] != IGNORED).sum()
