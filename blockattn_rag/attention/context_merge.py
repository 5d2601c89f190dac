"""Another weight for the context: how attention to it is merged with attention to the rest.

A model that was not fine-tuned for blocks spreads its attention over them otherwise than in full
mode. So the *context* C, all blocks of a prompt but its first, may be attended to at a temperature
T, and its log-sum-exp L_C be replaced by L' when it is merged with the *rest* O: the first block,
the final block and the generated tokens, of log-sum-exp L_O::

    out = (e^L' o_C + e^L_O o_O) / (e^L' + e^L_O)

===========  ==========================  =========================================================
``scale``    L' = L_O + S (T L_C - L_O)  ours; a constant added to all scores changes nothing
``bias``     L' = T L_C + B              ours; as above
``ape``      L' = S T L_C                APE (2502.05431; code: Infini-AI-Lab/APE), where it does
learned      L' = T L_C + B              T and B per layer and head; a constant is added to o_C
===========  ==========================  =========================================================

T = 1 with S = 1 or B = 0 is plain attention.

Shapes: ``B`` rows of the batch, ``H`` query heads, ``K`` key-value heads, ``Q`` query rows (tokens
times the heads that share keys, tokens innermost), ``D`` head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from blockattn_rag.attention.kernels import LEAST_LSE, Partial
from blockattn_rag.files.tensor_file import SUFFIX

Form = Literal["scale", "bias", "ape"]


@dataclass(frozen=True, slots=True)
class FixedMerge:
    """One weight for all layers and heads.

    Args:
        form: how the log-sum-exp is replaced; see the module.
        value: S, above 0, or B.
        temperature: T, above 0.
    """

    form: Form
    value: float
    temperature: float = 1.0

    def heat(self, layer: int, query: Tensor, scale: float) -> tuple[Tensor, float]:
        """Query and factor of the scores that attend to the context at its temperature."""
        return query, scale / self.temperature

    def combine(self, layer: int, context: Partial, rest: Partial) -> Tensor:
        """Attention ``[B, K, Q, D]`` to the context and the rest.

        Args:
            layer: index of the layer.
            context: attention to the context at its temperature.
            rest: attention to all else.
        """
        context_lse, rest_lse = (part.lse.clamp_min(LEAST_LSE) for part in (context, rest))
        heated = self.temperature * context_lse
        if self.form == "scale":
            log_odds = self.value * (heated - rest_lse)
        elif self.form == "bias":
            log_odds = heated + self.value - rest_lse
        else:
            log_odds = self.value * heated - rest_lse
        return _weighted(context, rest, log_odds)

    def ready_for(self, fingerprint: Callable[[], str], device: torch.device) -> FixedMerge:
        """Itself: it fits every model."""
        return self

    def check_layer(self, layer: int, heads: int, kv_heads: int) -> None:
        """It fits every layer."""


@dataclass(frozen=True, slots=True, eq=False)
class LearnedMerge:
    """Weights per layer and head, fitted to a model (form ``learned`` of the module).

    Its tensors may require gradients; ``combine`` and ``heat`` then give gradients to them.

    Args:
        log_temperature: ``[layers, H]``, float32: logarithms, so that temperatures stay positive.
        bias: ``[layers, H]``, float32: B.
        shift: ``[layers, K, D]``, float32: added to the output of the context.
        fingerprint: of the model that it was fitted to; empty: not said.
        made_with: the sink and the digest of the correction of the passages that it was fitted to;
            empty: not said.
    """

    log_temperature: Tensor
    bias: Tensor
    shift: Tensor
    fingerprint: str = ""
    made_with: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def identity(
        cls, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> LearnedMerge:
        """Plain attention, ready to be fitted: its tensors require gradients.

        ``head_dim``: size of a value.
        """

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, requires_grad=True)

        heads = num_layers, num_heads
        return cls(zeros(*heads), zeros(*heads), zeros(num_layers, num_kv_heads, head_dim))

    def parameters(self) -> Iterator[Tensor]:
        """The tensors to fit, for an optimiser."""
        yield from (self.log_temperature, self.bias, self.shift)

    def heat(self, layer: int, query: Tensor, scale: float) -> tuple[Tensor, float]:
        """Query and factor of the scores that attend to the context at its temperatures."""
        factor = (-self.log_temperature[layer]).exp()
        return (query * _by_row(factor, query).unsqueeze(-1)).to(query.dtype), scale

    def combine(self, layer: int, context: Partial, rest: Partial) -> Tensor:
        """As ``FixedMerge.combine``."""
        temperature = _by_row(self.log_temperature[layer].exp(), context.output)
        context_lse, rest_lse = (part.lse.clamp_min(LEAST_LSE) for part in (context, rest))
        log_odds = temperature * context_lse + _by_row(self.bias[layer], rest.output) - rest_lse
        shifted = context.output + self.shift[layer].unsqueeze(1)
        return _weighted(Partial(shifted, context.lse), rest, log_odds)

    def ready_for(self, fingerprint: Callable[[], str], device: torch.device) -> LearnedMerge:
        """This merge on ``device``; ``fingerprint`` gives the model's, if it is needed.

        Raises:
            ValueError: it was fitted to a model of another fingerprint.
        """
        if self.fingerprint and self.fingerprint != (found := fingerprint()):
            raise ValueError(
                f"found a learned merge of the model {self.fingerprint[:12]}..., expected one of "
                f"this model, {found[:12]}...; fit it anew for this model, in this dtype"
            )
        if self.bias.device == device:
            return self
        log_temperature, bias, shift = (tensor.to(device) for tensor in self.parameters())
        return LearnedMerge(log_temperature, bias, shift, self.fingerprint)

    def check_layer(self, layer: int, heads: int, kv_heads: int) -> None:
        """Raises ``ValueError`` unless it has weights for so many heads of this layer."""
        layers, own_heads = self.bias.shape
        own_kv_heads = self.shift.shape[1]
        if layer >= layers or (own_heads, own_kv_heads) != (heads, kv_heads):
            raise ValueError(
                f"found a learned merge of {layers} layers, {own_heads} heads and {own_kv_heads} "
                f"key-value heads, and {heads} heads and {kv_heads} key-value heads in layer "
                f"{layer} of the model; fit one for this model"
            )


ContextMerge = FixedMerge | LearnedMerge


def _by_row(of_heads: Tensor, states: Tensor) -> Tensor:
    """``[H]``, in the order of the query heads, as ``[K, Q]`` for states ``[B, K, Q, D]``."""
    kv_heads, rows = states.shape[1:3]
    grouped = of_heads.view(kv_heads, -1)
    return grouped.repeat_interleave(rows // grouped.shape[1], dim=1)


def _weighted(context: Partial, rest: Partial, log_odds: Tensor) -> Tensor:
    """The two outputs, weighted with the odds of the context against the rest."""
    share = log_odds.masked_fill(context.lse == -math.inf, -math.inf).sigmoid()
    return torch.lerp(rest.output, context.output, share.unsqueeze(-1))


_EXPECTED = (
    "expected 'none', 'scale:S', 'bias:B' or 'ape:S', each perhaps with ':T' behind, where S and "
    f"the temperature T are above 0 (scale:0.95, bias:-0.5:0.9), or a file *{SUFFIX} of a "
    "learned merge"
)


def parse_merge(text: str) -> FixedMerge | Path | None:
    """What a text names; a file is not read (``merge_file.load_merge`` does).

    Args:
        text: ``none``, ``FORM:VALUE``, ``FORM:VALUE:TEMPERATURE``, or a path.

    Raises:
        ValueError: it is none of these; says what was found.
    """
    if not isinstance(text, str):
        raise ValueError(f"found merge={text!r}; {_EXPECTED}")
    if text == "none":
        return None
    if text.endswith(SUFFIX):
        return Path(text)
    form, *given = text.split(":")
    try:
        numbers = [float(number) for number in given]
    except ValueError:
        numbers = []
    if form not in get_args(Form) or len(numbers) not in (1, 2):
        raise ValueError(f"found merge={text!r}; {_EXPECTED}")
    found = FixedMerge(cast(Form, form), *numbers)
    positive = [found.temperature, *([] if form == "bias" else [found.value])]
    if not all(map(math.isfinite, numbers)) or min(positive) <= 0:
        raise ValueError(f"found merge={text!r}; {_EXPECTED}")
    return found
