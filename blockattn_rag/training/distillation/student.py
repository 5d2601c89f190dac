"""The student: the model in block mode, with a part that is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from blockattn_rag.attention.context_merge import ContextMerge, LearnedMerge
from blockattn_rag.engine.fetcher import BlockFetcher, HowEncoded
from blockattn_rag.kv.context import Context, place
from blockattn_rag.model import BlockModel
from blockattn_rag.model.encoding import logits_to_keep
from blockattn_rag.model.reader import Reader
from blockattn_rag.model.running_cache import running_with
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.store.base import KVStore


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
    """

    def __init__(self, model: BlockModel, store: KVStore) -> None:
        self._model = model
        self._fetcher = BlockFetcher(model, store)

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
        merge: a learned merge to train, or any merge that a reader is trained on top of.
    """

    def __init__(
        self,
        model: BlockModel,
        *,
        reader: Reader | None = None,
        merge: ContextMerge | None = None,
    ) -> None:
        super().__init__()
        self.model, self.reader, self.merge = (model, reader, merge)
        if reader is not None:
            self.trained = nn.ParameterList(reader.parameters())
        elif isinstance(merge, LearnedMerge):
            self.trained = nn.ParameterList(tensor.detach() for tensor in merge.parameters())
            log_temperature, bias, shift = self.trained
            self.merge = LearnedMerge(log_temperature, bias, shift, merge.fingerprint)
        else:
            raise ValueError("expected a reader or a learned merge to train, found neither")

    def forward(self, ready: ReadyPrompt, answer_ids: Sequence[int]) -> Tensor:
        """Logits ``[answer tokens, vocab]``, the first row before the answer's first token.

        Args:
            ready: the prompt.
            answer_ids: token ids of an answer, at least one.
        """
        model = self.model
        given = torch.tensor([[*ready.final_ids, *answer_ids[:-1]]], device=model.device)
        with model.lock, running_with():
            cache = model.cache_for(
                ready.context, assembly="copy", reader=self.reader, merge=self.merge
            )
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
