"""Multi-head latent attention computed on latents, without expanding them to keys and values.

A latent layer computes each head's key and value as linear maps of a token's latent. Applying the
maps to the few queries and outputs instead of the many latents gives the same result:
``q · (K l) = (Kᵀ q) · l``, and ``Σ w (V l) = V (Σ w l)``. All heads then share one key (rotary key
and latent) and one value (latent).

Shapes: ``B`` batch rows, ``H`` heads, ``T`` tokens, ``D`` size of the unrotated part of a head's
key, ``P`` size of the rotary key, ``R`` size of the latent, ``V`` size of a value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blockattn_rag.attention.merge import Partial


class LatentMap(NamedTuple):
    """Linear maps from a layer's latents to the unrotated part of its heads' keys, ``[H, R, D]``,
    and to the values, ``[H, R, V]``."""

    key: Tensor
    value: Tensor

    def queries(self, query: Tensor) -> Tensor:
        """Convert the model's queries ``[B, H, T, D + P]`` to queries for rotary keys and latents,
        ``[B, 1, H * T, P + R]``."""
        still, rotary = query.tensor_split([self.key.shape[-1]], dim=-1)
        return torch.cat([rotary, still @ self.key.mT], dim=-1).flatten(1, 2).unsqueeze(1)

    def outputs(self, part: Partial) -> Partial:
        """Convert attention over ``latent_states`` to attention over values, ``[B, H, T, V]``."""
        heads, rank, _ = self.value.shape
        output, lse = (torch.unflatten(one.squeeze(1), 1, (heads, -1)) for one in part)
        latents = output[..., -rank:].to(self.value.dtype)
        return Partial((latents @ self.value).float(), lse)


def latent_states(keys: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
    """Join rotary keys and latents ``[1, tokens, ...]`` into a tensor ``[1, tokens, P + R]``, which
    is returned as both keys and values, because fused kernels require equal head sizes."""
    joined = torch.cat([keys, latents], dim=-1)
    return joined, joined
