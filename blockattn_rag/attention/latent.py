"""Attention to latents (multi-head latent attention), without expanding them to keys and values.

A latent layer computes each head's key and value as linear maps of a token's latent. The maps are
applied to the few queries and outputs instead of the many latents, which gives the same result:
``q · (K l) = (Kᵀ q) · l``, and ``Σ w (V l) = V (Σ w l)``. All heads then share one key (the rotary
key and the latent) and one value (the latent).

Shapes: ``B`` rows of the batch, ``H`` heads, ``T`` tokens, ``D`` size of the part of a head's key
that does not rotate, ``P`` size of the rotary key, ``R`` size of the latent, ``V`` size of a value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blockattn_rag.attention.merge import Partial


class LatentMap(NamedTuple):
    """Linear maps from the latents of a layer to the keys and values of its heads.

    Args:
        key: ``[H, R, D]``.
        value: ``[H, R, V]``.
    """

    key: Tensor
    value: Tensor

    def queries(self, query: Tensor) -> Tensor:
        """Convert the model's queries ``[B, H, T, D + P]`` to queries of rotary keys and latents,
        ``[B, 1, H * T, P + R]``."""
        still, rotary = query.tensor_split([self.key.shape[-1]], dim=-1)
        return torch.cat([rotary, still @ self.key.mT], dim=-1).flatten(1, 2).unsqueeze(1)

    def outputs(self, part: Partial) -> Partial:
        """Convert attention to ``latent_states`` to attention to values, ``[B, H, T, V]``."""
        heads, rank, _ = self.value.shape
        output, lse = (torch.unflatten(one.squeeze(1), 1, (heads, -1)) for one in part)
        latents = output[..., -rank:].to(self.value.dtype)
        return Partial((latents @ self.value).float(), lse)


def latent_states(keys: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values ``[1, tokens, P + R]`` that all heads share, from rotary keys and latents
    ``[1, tokens, ...]``. One tensor is both, because fused kernels require equal sizes."""
    joined = torch.cat([keys, latents], dim=-1)
    return joined, joined
