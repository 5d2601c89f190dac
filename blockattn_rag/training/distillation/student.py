"""The student: the model in block mode, with a part that is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from blockattn_rag.attention.context_merge import ContextMerge, LearnedMerge
from blockattn_rag.engine.fetcher import BlockFetcher, HowEncoded
from blockattn_rag.kv.context import Context, place
from blockattn_rag.kv.quantization import KVDtype
from blockattn_rag.model import BlockModel
from blockattn_rag.model.correction import Correction, LayerCorrection
from blockattn_rag.model.encoding import logits_to_keep
from blockattn_rag.model.reader import Reader
from blockattn_rag.model.running_cache import running_with
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.store.base import KVStore
from blockattn_rag.store.namespaces import OPEN, Access

_BIAS_UNIT = 20.0
"""A correction's constants are trained in this unit: they are so much larger than its weights, and
Adam's steps are of one size for all."""


class ReadyPrompt(NamedTuple):
    """A prompt of block mode: its placed blocks, and the token ids of its final block."""

    context: Context
    final_ids: list[int]


class BlockSource:
    """Prompts made ready for block mode: passages' keys and values come from a store, and those
    that it lacks are computed by the stock model and stored.

    Args:
        model: the model.
        store: where keys and values are stored.
        access: in which namespaces; see ``BlockFetcher``.
        kv_dtype: what those are kept in that are computed now.
    """

    def __init__(
        self,
        model: BlockModel,
        store: KVStore,
        access: Access = OPEN,
        kv_dtype: KVDtype = "model",
    ) -> None:
        self._model = model
        self._fetcher = BlockFetcher(model, store, access=access, kv_dtype=kv_dtype)

    def __call__(self, prompt: BlockPrompt, how: HowEncoded) -> ReadyPrompt:
        """The prompt with its blocks, encoded as ``how`` says."""
        context, final_ids = self._model.tokenizer.with_final_ids(prompt)
        blocks = self._fetcher.fetch(context, "compute", how=how).blocks
        return ReadyPrompt(place(blocks), final_ids)


class Student(nn.Module):
    """Block mode along given answers, differentiable in what is trained.

    The module's parameters are those that are trained. The model is no part of it: its weights must
    be frozen, and are neither trained, nor moved, nor saved with the module.

    Args:
        model: the model.
        reader: a reader adapter to train; or
        merge: a learned merge to train, or any merge that a reader is trained on top of; or
        correction: a correction to train, of contexts that come without it.
    """

    def __init__(
        self,
        model: BlockModel,
        *,
        reader: Reader | None = None,
        merge: ContextMerge | None = None,
        correction: Correction | None = None,
    ) -> None:
        super().__init__()
        self.model, self.reader, self.merge = (model, reader, merge)
        self._start = correction
        if reader is not None:
            self.trained = nn.ParameterList(reader.parameters())
        elif correction is not None:
            pairs = ((one.weight, one.bias / _BIAS_UNIT) for one in correction.layers)
            tensors = (tensor for pair in pairs for tensor in pair)
            self.trained = nn.ParameterList(one.to(model.device, copy=True) for one in tensors)
        elif isinstance(merge, LearnedMerge):
            self.trained = nn.ParameterList(tensor.detach() for tensor in merge.parameters())
            log_temperature, bias, shift = self.trained
            self.merge = LearnedMerge(log_temperature, bias, shift, merge.fingerprint)
        else:
            raise ValueError(
                "expected a reader, a learned merge or a correction to train, found none"
            )

    @property
    def correction(self) -> Correction | None:
        """The correction as it is by now; None if another part is trained."""
        if self._start is None:
            return None
        tensors = iter(self.trained)
        layers = (
            LayerCorrection(weight, bias * _BIAS_UNIT)
            for weight, bias in zip(tensors, tensors, strict=True)
        )
        return replace(self._start, layers=tuple(layers))

    def forward(self, ready: ReadyPrompt, answer_ids: Sequence[int]) -> Tensor:
        """Logits ``[answer tokens, vocab]``, the first row before the answer's first token.

        Args:
            ready: the prompt.
            answer_ids: token ids of an answer, at least one.
        """
        model, context = self.model, ready.context
        if (correction := self.correction) is not None:
            first, *others = context.blocks
            layouts = model.profile.layouts
            moved = (b._replace(kv=correction.applied(b.kv, layouts)) for b in others)
            context = Context((first, *moved))
        given = torch.tensor([[*ready.final_ids, *answer_ids[:-1]]], device=model.device)
        with model.lock, running_with():
            cache = model.cache_for(context, assembly="copy", reader=self.reader, merge=self.merge)
            out = model.hf_model(
                input_ids=given,
                past_key_values=cache,
                use_cache=True,
                **logits_to_keep(model.hf_model, len(answer_ids)),
            )
        logits: Tensor = out.logits[0, -len(answer_ids) :]
        return logits

    def distance_from_identity(self) -> Tensor:
        """Mean square of a merge's parameters, which are all 0 in plain attention."""
        return torch.cat([tensor.flatten() for tensor in self.trained]).square().mean()
