"""Correction: keys and values of a block, moved towards those that full attention would compute.

In full mode a passage sees the passages before it; in block mode it sees itself alone. Much of what
this changes in its keys and values does not depend on the other passages: it is a linear function
of the block's own keys and values, and a constant for each of its first tokens. Both are fitted
once for a model, in closed form, from passages alone (``lab.repair.closed_form``), and applied when
a block is encoded, or to what is stored of it. So a corrected block costs nothing more per answer;
it is another block than the uncorrected one.

For each layer and key-value head, with keys ``k`` before their rotation and values ``v``::

    [k'; v'] = [k; v] + W [k; v] + b(place of the token in its block)

A correction's file is a safetensors file with two tensors for each layer L: ``weight.L``
``[K, D, D]`` and ``bias.L`` ``[K, NUM_PLACES, D]``, float32, or bfloat16 where that loses nothing.
The metadata have ``format``, ``version``, ``sink`` and the model's ``fingerprint``.

Shapes: ``K`` key-value heads, ``n`` tokens, ``D`` size of a head's key and value together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from blockattn_rag.files import replacing
from blockattn_rag.kv.block_kv import BlockKV, corrected_digest
from blockattn_rag.kv.rope import RotaryLayout, rotate
from blockattn_rag.model.probe import StateOutline

PLACES = (1, 2, 4, 8, 16, 32, 64)
"""Ends of the groups of places in a block that share a constant; the last group has no end."""

NUM_PLACES = len(PLACES) + 1


class LayerCorrection(NamedTuple):
    """One layer's: ``weight`` ``[K, D, D]``, of which a row vector of states is the left factor,
    and ``bias`` ``[K, NUM_PLACES, D]``, float32."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, eq=False, repr=False)  # without slots, for the digest's sake
class Correction:
    """The correction of one model's blocks. Equal if the digests are.

    Args:
        layers: one per layer.
        sink: what blocks must be encoded after; it was fitted to such blocks.
        fingerprint: of the model.
    """

    layers: tuple[LayerCorrection, ...]
    sink: str
    fingerprint: str

    @cached_property
    def digest(self) -> str:
        """sha256 of the contents, 64 hex digits: part of the identity of corrected blocks."""
        digest = hashlib.sha256(f"{self.sink} {self.fingerprint} {len(self.layers)}".encode())
        for layer in self.layers:
            for tensor in layer:
                digest.update(f"{tuple(tensor.shape)}".encode())
                digest.update(tensor.float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Correction) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Correction({self.digest[:6]}, sink={self.sink!r})"

    def check_shapes(self, layers: Sequence[tuple[StateOutline, StateOutline]]) -> None:
        """Refuse a correction for another number of layers, or for other shapes.

        Args:
            layers: of a model, its keys and values; ``AttentionProfile.layer_outlines``.

        Raises:
            ValueError: the model has other shapes.
        """
        if len(self.layers) != len(layers):
            raise ValueError(
                f"The correction has {len(self.layers)} layers, expected {len(layers)} for this "
                "model: use the one that was fitted to it."
            )
        for index, (layer, (keys, values)) in enumerate(zip(self.layers, layers, strict=True)):
            found = tuple(layer.bias.shape)
            expected = (keys.heads, NUM_PLACES, keys.size + values.size)
            if found != expected or keys.heads != values.heads:
                raise ValueError(
                    f"The correction has the shape {found} in layer {index}, expected {expected} "
                    "for this model: use the one that was fitted to it."
                )

    def digest_of(self, digest: str) -> str:
        """The digest of a block that is corrected; ``digest`` is that of the block without."""
        return corrected_digest(digest, self.digest)

    def corrected(self, kv: BlockKV, layouts: Sequence[RotaryLayout]) -> BlockKV:
        """A block, corrected.

        Args:
            kv: as the model encoded it, its keys rotated for the positions 0..n-1.
            layouts: how the keys of each layer are rotated.

        Returns:
            A new block under its own digest, of the same dtypes and shapes.
        """
        with torch.inference_mode():
            return replace(self.applied(kv, layouts), digest=self.digest_of(kv.digest))

    def applied(self, kv: BlockKV, layouts: Sequence[RotaryLayout]) -> BlockKV:
        """``corrected`` under the digest of the block without, for training: gradients reach the
        layers' tensors. A block in int8 becomes one in the model's type."""
        states = [
            self._apply(index, *kv.states(index), layout) for index, layout in enumerate(layouts)
        ]
        keys, values = zip(*states, strict=True)
        return replace(kv, keys=keys, values=values, scales=None)

    def _layers_on(self, device: torch.device) -> Sequence[LayerCorrection]:
        """The layers on a device, which get there once."""
        if device not in self._copies:
            self._copies[device] = [
                LayerCorrection(*(tensor.to(device) for tensor in layer)) for layer in self.layers
            ]
        return self._copies[device]

    @cached_property
    def _copies(self) -> dict[torch.device, Sequence[LayerCorrection]]:
        return {}

    def _apply(
        self, layer: int, keys: Tensor, values: Tensor, layout: RotaryLayout
    ) -> tuple[Tensor, Tensor]:
        """One layer of a block, corrected.

        Args:
            layer: index of the layer.
            keys: ``[K, n, key size]``, rotated for the positions 0..n-1.
            values: ``[K, n, value size]``.
            layout: how the keys are rotated.

        Returns:
            New keys and values of the same shapes and dtypes. Computed in float32.
        """
        weight, bias = self._layers_on(keys.device)[layer]
        states = bare_states(keys, values, layout)
        change = states @ weight + bias[:, places(states.shape[1]).to(keys.device)]
        of_keys, of_values = change.split([keys.shape[-1], values.shape[-1]], dim=-1)
        if layout.rotates:
            positions = torch.arange(keys.shape[1])
            of_keys = rotate(of_keys, *layout.cos_sin(positions, keys.device), layout)
        new_keys = (keys.float() + of_keys).to(keys.dtype)
        return new_keys, (values.float() + of_values).to(values.dtype)


def bare_states(
    keys: Tensor, values: Tensor, layout: RotaryLayout, positions: Sequence[int] | None = None
) -> Tensor:
    """Keys without their rotation, and values beside them: ``[K, n, D]``, float32.

    Args:
        keys, values, layout: as for ``Correction.apply``.
        positions: for which the keys are rotated; default: 0..n-1.
    """
    bare = keys.float()
    if layout.rotates:
        at = range(keys.shape[1]) if positions is None else positions
        offsets = -torch.tensor(at)
        bare = rotate(bare, *layout.cos_sin(offsets, keys.device), layout)
    return torch.cat([bare, values.float()], dim=-1)


def places(num_tokens: int) -> Tensor:
    """The group of places of each token of a block, ``[num_tokens]``."""
    return torch.bucketize(torch.arange(num_tokens), torch.tensor(PLACES), right=True)


_FORMAT = {"format": "blockattn_rag.correction", "version": "1"}


def save_correction(correction: Correction, path: Path) -> None:
    """Write a correction, completely or not at all.

    Raises:
        ValueError: a number is not finite, or a shape is wrong.
        OSError: the file cannot be written.
    """
    tensors = {
        f"{name}.{index}": _compact(tensor.detach().float().cpu())
        for index, layer in enumerate(correction.layers)
        for name, tensor in layer._asdict().items()
    }
    _layers(path, tensors)
    metadata = {**_FORMAT, "sink": correction.sink, "fingerprint": correction.fingerprint}
    with replacing(path) as file:
        file.write(save(tensors, metadata))


def _compact(tensor: Tensor) -> Tensor:
    """The same numbers in bfloat16, where that loses nothing."""
    half = tensor.bfloat16()
    return (half if torch.equal(half.float(), tensor) else tensor).contiguous()


def read_correction(path: Path) -> Correction:
    """Read a correction.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no file of a correction: {error}") from error
    if found := {
        name: metadata.get(name) for name in _FORMAT if metadata.get(name) != _FORMAT[name]
    }:
        raise ValueError(f"{path} is no file of a correction: found {found}, expected {_FORMAT}.")
    if missing := {"sink", "fingerprint"} - metadata.keys():
        raise ValueError(f"{path} is damaged: its metadata lack {', '.join(sorted(missing))}.")
    return Correction(_layers(path, tensors), metadata["sink"], metadata["fingerprint"])


def _layers(path: Path, tensors: dict[str, Tensor]) -> tuple[LayerCorrection, ...]:
    """The layers; raises ``ValueError`` unless names, shapes and numbers are a correction's."""
    layers = []
    for index in range(len(tensors) // 2):
        try:
            layer = LayerCorrection(tensors[f"weight.{index}"], tensors[f"bias.{index}"])
        except KeyError as error:
            raise ValueError(f"{path}: found no tensor {error.args[0]}") from error
        shapes = tuple(layer.weight.shape), tuple(layer.bias.shape)
        heads, _, size = shapes[1] if len(shapes[1]) == 3 else (0, 0, 0)
        if shapes != ((heads, size, size), (heads, NUM_PLACES, size)):
            raise ValueError(
                f"{path}: found shapes {shapes[0]} and {shapes[1]} in layer {index}, expected "
                f"(heads, size, size) and (heads, {NUM_PLACES}, size)"
            )
        for name, tensor in layer._asdict().items():
            if not tensor.is_floating_point():
                raise ValueError(
                    f"{path}: found {tensor.dtype} in {name}.{index}, expected floating point"
                )
            if not tensor.isfinite().all():
                raise ValueError(
                    f"{path}: found NaN or infinity in {name}.{index}, expected finite numbers"
                )
        layers.append(LayerCorrection(*(tensor.float() for tensor in layer)))
    if len(tensors) != 2 * len(layers) or not layers:
        raise ValueError(f"{path}: found {len(tensors)} tensors, expected two for each layer")
    return tuple(layers)
