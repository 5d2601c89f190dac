"""Correction: an affine map that moves a block's keys and values closer to full attention.

In full mode, a passage attends to the passages before it; in block mode, only to itself. Much of
the resulting change in its keys and values does not depend on the other passages: it is a linear
function of a token's own keys and values, plus a constant for its place in the block. Both are
fitted once per model, in closed form, from passages without questions (``lab.repair.closed_form``).
The correction is applied when a block is encoded, or to a stored block, so answers take no longer.
A corrected block has its own digest.

For each layer and key-value head, with keys ``k`` before their rotation and values ``v``::

    [k'; v'] = [k; v] + W [k; v] + b(index of the token in its block)

A correction is stored in a safetensors file with two tensors for each layer L: ``weight.L``
``[K, D, D]`` and ``bias.L`` ``[K, NUM_PLACES, D]``, in float32, or in bfloat16 if that is lossless.
The metadata contains ``format``, ``version``, ``sink`` and the model's ``fingerprint``.

Shapes: ``K`` key-value heads, ``n`` tokens, ``D`` combined size of a head's key and value.
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
"""Exclusive upper bounds of groups of token indices that share a bias. A final group has none."""

NUM_PLACES = len(PLACES) + 1


class LayerCorrection(NamedTuple):
    """Correction for one layer, in float32: ``weight`` ``[K, D, D]``, applied as
    ``states @ weight``, and ``bias`` ``[K, NUM_PLACES, D]``."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, eq=False, repr=False)  # Without slots: cached_property needs a __dict__.
class Correction:
    """Correction for one model's blocks. Corrections with equal digests are equal.

    Args:
        sink: Sink that was used for fitting. Blocks must be encoded with the same sink.
        fingerprint: Fingerprint of the model.
    """

    layers: tuple[LayerCorrection, ...]
    sink: str
    fingerprint: str

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the contents, 64 hex digits. Part of the digest of corrected blocks."""
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
        """Raise ``ValueError`` if the correction does not match the number of layers and the tensor
        shapes of a model. ``layers``: The model's ``AttentionProfile.layer_outlines``."""
        if len(self.layers) != len(layers):
            raise ValueError(
                f"The correction has {len(self.layers)} layers, expected {len(layers)} for this "
                "model: use a correction that was fitted to this model."
            )
        for index, (layer, (keys, values)) in enumerate(zip(self.layers, layers, strict=True)):
            if keys.heads != values.heads:
                raise ValueError(
                    f"Layer {index} has {keys.heads} key heads and {values.heads} value heads, "
                    "expected equal numbers: use a recipe without an adapter."
                )
            found = tuple(layer.bias.shape)
            expected = (keys.heads, NUM_PLACES, keys.size + values.size)
            if found != expected:
                raise ValueError(
                    f"The correction has the shape {found} in layer {index}, expected {expected} "
                    "for this model: use a correction that was fitted to this model."
                )

    def corrected(self, kv: BlockKV, layouts: Sequence[RotaryLayout]) -> BlockKV:
        """Apply the correction to an uncorrected block. Returns a new block with its own digest."""
        with torch.inference_mode():
            digest = corrected_digest(kv.digest, self.digest)
            return replace(self.applied(kv, layouts), digest=digest)

    def applied(self, kv: BlockKV, layouts: Sequence[RotaryLayout]) -> BlockKV:
        """Apply the correction to a block, but keep its digest. Used in training, because gradients
        flow to the correction's tensors. An int8 block is dequantized to the model's dtype."""
        states = [
            self._apply(index, *kv.states(index), layout) for index, layout in enumerate(layouts)
        ]
        keys, values = zip(*states, strict=True)
        return replace(kv, keys=keys, values=values, scales=None)

    @cached_property
    def _copies(self) -> dict[torch.device, Sequence[LayerCorrection]]:
        """The layers' tensors on each device that blocks were corrected on."""
        return {}

    def _apply(
        self, layer: int, keys: Tensor, values: Tensor, layout: RotaryLayout
    ) -> tuple[Tensor, Tensor]:
        """Correct the keys ``[K, n, key size]`` and values of one layer, in float32."""
        device = keys.device
        if device not in self._copies:
            self._copies[device] = [
                LayerCorrection(*(tensor.to(device) for tensor in own)) for own in self.layers
            ]
        weight, bias = self._copies[device][layer]
        positions = range(keys.shape[1])
        states = bare_states(keys, values, layout, positions)
        change = states @ weight + bias[:, places(len(positions)).to(device)]
        of_keys, of_values = change.split([keys.shape[-1], values.shape[-1]], dim=-1)
        if layout.rotates:
            of_keys = rotate(of_keys, *layout.cos_sin(torch.tensor(positions), device), layout)
        new_keys = (keys.float() + of_keys).to(keys.dtype)
        return new_keys, (values.float() + of_values).to(values.dtype)


def bare_states(
    keys: Tensor, values: Tensor, layout: RotaryLayout, positions: Sequence[int]
) -> Tensor:
    """Concatenate keys ``[K, n, key size]``, rotated back from their positions, and values. Returns
    ``[K, n, D]``, float32."""
    bare = keys.float()
    if layout.rotates:
        bare = rotate(bare, *layout.cos_sin(-torch.tensor(positions), keys.device), layout)
    return torch.cat([bare, values.float()], dim=-1)


def places(num_tokens: int) -> Tensor:
    """Index in ``PLACES`` of the group that each token of a block belongs to, ``[num_tokens]``."""
    return torch.bucketize(torch.arange(num_tokens), torch.tensor(PLACES), right=True)


_FORMAT = {"format": "blockattn_rag.correction", "version": "1"}


def save_correction(correction: Correction, path: Path) -> None:
    """Write a correction to a file atomically. Raises the errors of ``correction_bytes``."""
    content = correction_bytes(correction)
    with replacing(path) as file:
        file.write(content)


def correction_bytes(correction: Correction) -> bytes:
    """Serialize a correction to the contents of its file.

    Raises:
        ValueError: A number is not finite, or a shape is wrong.
    """

    def compact(tensor: Tensor) -> Tensor:
        exact = tensor.detach().float().cpu()
        half = exact.bfloat16()
        return (half if torch.equal(half.float(), exact) else exact).contiguous()

    tensors = {
        f"{name}.{index}": compact(tensor)
        for index, layer in enumerate(correction.layers)
        for name, tensor in layer._asdict().items()
    }
    _layers("The correction", tensors)
    metadata = {**_FORMAT, "sink": correction.sink, "fingerprint": correction.fingerprint}
    return save(tensors, metadata)


def read_correction(path: Path) -> Correction:
    """Read a correction from a file.

    Raises:
        ValueError: The file is missing, damaged, or not a correction.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError) as error:
        # Safetensors raises RuntimeError for a file that was just deleted.
        raise ValueError(f"Cannot read the correction file {path}: {error}") from error
    wrong = {name: metadata.get(name) for name in _FORMAT if metadata.get(name) != _FORMAT[name]}
    if wrong:
        raise ValueError(f"{path} is not a correction file: found {wrong}, expected {_FORMAT}.")
    if missing := {"sink", "fingerprint"} - metadata.keys():
        raise ValueError(f"{path} is damaged: its metadata lacks {', '.join(sorted(missing))}.")
    return Correction(_layers(path, tensors), metadata["sink"], metadata["fingerprint"])


def _layers(path: Path | str, tensors: dict[str, Tensor]) -> tuple[LayerCorrection, ...]:
    """Validate tensors, and return them by layer. Raises ``ValueError`` if any are invalid."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{path}: found {tensor.dtype} in {name}, expected floating point")
        if not tensor.isfinite().all():
            raise ValueError(f"{path}: found NaN or infinity in {name}, expected finite numbers")
    layers = []
    for index in range(len(tensors) // 2):
        try:
            layer = LayerCorrection(
                tensors[f"weight.{index}"].float(), tensors[f"bias.{index}"].float()
            )
        except KeyError as error:
            raise ValueError(f"{path}: missing tensor {error.args[0]}") from error
        shapes = tuple(layer.weight.shape), tuple(layer.bias.shape)
        heads, _, size = shapes[1] if len(shapes[1]) == 3 else (0, 0, 0)
        if shapes != ((heads, size, size), (heads, NUM_PLACES, size)):
            raise ValueError(
                f"{path}: found shapes {shapes[0]} and {shapes[1]} in layer {index}, expected "
                f"(heads, size, size) and (heads, {NUM_PLACES}, size)"
            )
        layers.append(layer)
    if len(tensors) != 2 * len(layers) or not layers:
        raise ValueError(f"{path}: found {len(tensors)} tensors, expected two per layer")
    return tuple(layers)
