"""Reader adapters: LoRA that acts while the final block and the answer of a request are computed.

It never acts while blocks are encoded, and never in full mode. So blocks' keys and values are the
stock model's, bit for bit, and one store serves requests with any reader and with none.

No module is wrapped or renamed. A forward hook on each linear layer looks whether the cache of the
running forward carries a reader (``ContextCache.reader``), and adds what it says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockattn_rag.kv.context import Context
from blockattn_rag.model.exclusion import lock_of
from blockattn_rag.model.lora import Lora, lora_digest, new_lora
from blockattn_rag.model.lora_config import ALL_LINEAR, all_linear, names_layer
from blockattn_rag.model.lora_files import read_loras, read_metadata, state_of, write_loras
from blockattn_rag.model.running_cache import note_caches, running_cache


class Reader:
    """LoRA matrices by the path of the layer that they adapt, such as
    ``model.layers.0.self_attn.q_proj``.

    To train one, give its ``parameters()`` to an optimizer and run the model over a cache with
    ``reader`` set. Recomputing layers in the backward pass (gradient checkpointing) is no forward
    of the model, so the reader would not act there; leave it off.

    Args:
        layers: float32 matrices.
        metadata: what is saved beside them; empty for an adapter that PEFT alone wrote.
    """

    def __init__(
        self, layers: Mapping[str, Lora], metadata: Mapping[str, Any] | None = None
    ) -> None:
        self.layers = dict(layers)
        self.metadata = dict(metadata or {})
        self._digest: tuple[object, str] | None = None

    @classmethod
    def new(
        cls,
        hf_model: PreTrainedModel,
        *,
        rank: int = 16,
        alpha: float = 32,
        targets: Sequence[str] | str = ALL_LINEAR,
        seed: int = 0,
    ) -> Reader:
        """A reader to train, which changes nothing yet.

        Args:
            targets: ends of the paths of linear layers, such as ``["q_proj", "o_proj"]``, or
                ``"all-linear"``: all but the output head.
            seed: decides the first matrices, alike on all devices.

        Raises:
            ValueError: a rank or alpha that is not positive, no such layers, other layers than
                ``torch.nn.Linear``, or a model that PEFT has wrapped.
        """
        if type(rank) is not int or rank < 1:
            raise ValueError(f"rank must be a whole number of at least 1, found {rank!r}")
        if not (alpha > 0 and math.isfinite(alpha)):
            raise ValueError(f"alpha must be a number above 0, found {alpha!r}")
        generator = torch.Generator().manual_seed(seed)
        linears = _targets(hf_model, targets)
        return cls(
            {path: new_lora(layer, rank, alpha, generator) for path, layer in linears.items()}
        )

    @classmethod
    def load(
        cls, folder: str | Path, hf_model: PreTrainedModel, *, fingerprint: str | None = None
    ) -> Reader:
        """Read a reader that ``save`` wrote, or a LoRA adapter of PEFT; its matrices are frozen.

        Args:
            fingerprint: of the model, which must be the one that the reader was saved for. None
                leaves that unchecked, and so does an adapter without ``reader.json``.

        Raises:
            FileNotFoundError: the folder holds no adapter.
            ValueError: the files are damaged, ask for more than plain LoRA, or do not fit the
                model.
        """
        folder = Path(folder)
        metadata = read_metadata(folder)
        if metadata and fingerprint not in (None, metadata["fingerprint"]):
            raise ValueError(
                f"the reader in {folder} was made for a model of fingerprint "
                f"{metadata['fingerprint']}, found {fingerprint}: other weights, another dtype or "
                "another setting. Load the model that it was made for, or train a reader for this "
                "one. To take it as a plain LoRA adapter all the same, remove reader.json"
            )
        reader = cls(read_loras(folder, hf_model), metadata)
        if metadata and metadata["digest"] != reader.digest:
            raise ValueError(
                f"the matrices in {folder} are not those that reader.json tells of (sha256 "
                f"{reader.digest}, expected {metadata['digest']}); get the folder anew"
            )
        return reader

    def save(self, folder: str | Path, metadata: Mapping[str, Any]) -> None:
        """Write the reader as PEFT's files and ``reader.json``, whole or not at all.

        An earlier reader is replaced and stays whole until then; an empty folder may be there too.

        Args:
            metadata: what JSON can hold, with the ``fingerprint`` of the model that the reader is
                for (``BlockModel.fingerprint``); ``base_model``, its name, is for PEFT.

        Raises:
            FileExistsError: ``folder`` holds something else.
            ValueError: no fingerprint, or a number in the matrices that is not finite.
        """
        write_loras(Path(folder), self.layers, {**metadata, "digest": self.digest})

    @property
    def digest(self) -> str:
        """sha256 of the contents, 64 hex digits."""
        matrices = tuple(self.parameters())
        if any(matrix.requires_grad for matrix in matrices):
            return lora_digest(self.layers)  # an optimizer's writes may leave no trace
        made_of = tuple((matrix.data_ptr(), matrix._version) for matrix in matrices)
        if self._digest is None or self._digest[0] != made_of:
            self._digest = made_of, lora_digest(self.layers)
        return self._digest[1]

    def parameters(self) -> Iterator[nn.Parameter]:
        """The matrices, in a fixed order."""
        for _, lora in sorted(self.layers.items()):
            yield from (lora.down, lora.up)

    def attach(self, hf_model: PreTrainedModel) -> None:
        """Let a model take readers from the caches of its forwards; else nothing changes.

        Hooks are installed once per layer, and know neither the reader nor the model.

        Raises:
            ValueError: the reader is not for such a model.
        """
        bare = [
            (path, layer)
            for path, lora in self.layers.items()
            if not _is_hooked(layer := _layer(hf_model, path, lora), path)
        ]
        if bare:
            with lock_of(hf_model):  # nobody runs the model meanwhile
                note_caches(hf_model)
                for path, layer in bare:
                    if not _is_hooked(layer, path):  # by another thread
                        layer.register_forward_hook(partial(_adapt, path))


def _adapt(path: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
    """A linear layer's hook: the output with the running reader's adapter; None: as it is."""
    cache = running_cache()
    if cache is None or cache.reader is None:
        return None
    lora = cache.reader.layers.get(path)
    return None if lora is None else lora(inputs[0], output)


def _is_hooked(layer: nn.Module, path: str) -> bool:
    hooks = layer._forward_hooks.values()
    return any(isinstance(h, partial) and h.func is _adapt and h.args == (path,) for h in hooks)


def _layer(hf_model: nn.Module, path: str, lora: Lora) -> nn.Linear:
    """The layer that an adapter is for."""
    try:
        layer = hf_model.get_submodule(path)
    except AttributeError:
        layer = None
    expected = lora.down.shape[1], lora.up.shape[0]
    if isinstance(layer, nn.Linear) and (layer.in_features, layer.out_features) == expected:
        return layer
    raise ValueError(
        f"the reader adapts a linear layer {path} of {expected[0]} inputs and {expected[1]} "
        f"outputs, and {type(hf_model).__name__} has {layer or 'none'} there; load the reader for "
        "this model"
    )


def _targets(hf_model: PreTrainedModel, targets: Sequence[str] | str) -> dict[str, nn.Linear]:
    """The linear layers that targets name, by path."""
    if any(hasattr(module, "base_layer") for module in hf_model.modules()):
        raise ValueError(
            "the model has adapters of PEFT in it; merge them (merge_and_unload) first"
        )
    if targets == ALL_LINEAR:
        return all_linear(hf_model)
    names = [targets] if isinstance(targets, str) else [*targets]
    modules = dict(hf_model.named_modules())
    for name in names:
        if not any(names_layer([name], path) for path in modules):
            raise ValueError(f"the model has no layers {name} to adapt")
    found = {path: module for path, module in modules.items() if names_layer(names, path)}
    if not found:
        raise ValueError("found no targets, expected names of linear layers, or 'all-linear'")
    others = sorted(p for p, module in found.items() if not isinstance(module, nn.Linear))
    if others:
        kind = type(found[others[0]]).__name__
        raise ValueError(
            f"{others[0]} is a {kind}; a reader adapts linear layers (torch.nn.Linear) alone"
        )
    return {path: module for path, module in found.items() if isinstance(module, nn.Linear)}


def is_needed(contexts: Sequence[Context]) -> bool:
    """Whether block mode over these contexts, the rows of a batch, differs from full mode.

    Over the prompt's first block alone it does not, so there is nothing for a reader to repair.

    Raises:
        ValueError: it does for some rows of the batch, and not for others.
    """
    needed = {len(context.blocks) > 1 for context in contexts}
    if len(needed) > 1:
        raise ValueError(
            "a batch with a reader holds prompts of several context blocks, or prompts of one or "
            "none; found both. Answer them in two batches"
        )
    return needed == {True}


class Readers:
    """The readers of one model that were loaded last, by folder."""

    def __init__(self, most: int = 8) -> None:
        self._most = most
        self._loaded: dict[Path, tuple[object, Reader]] = {}

    def load(self, folder: str | Path, hf_model: PreTrainedModel, fingerprint: str) -> Reader:
        """Read the reader in ``folder``, unless it was read before and its files are as they were.

        Raises as ``Reader.load``.
        """
        path = Path(folder).expanduser().resolve()
        made_of = (fingerprint, *state_of(path))
        known = self._loaded.pop(path, None)
        if known is None or known[0] != made_of:
            known = made_of, Reader.load(path, hf_model, fingerprint=fingerprint)
        self._loaded[path] = known  # the latest stands last
        while len(self._loaded) > self._most:
            self._loaded.pop(next(iter(self._loaded)), None)
        return known[1]
