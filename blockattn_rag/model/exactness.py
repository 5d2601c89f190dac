"""Whether relay attention is exact for a model: measured on a short probe."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from blockattn_rag.attention.relay import RelayPlan
from blockattn_rag.attention.tuning import tuning_of
from blockattn_rag.kv.context import place
from blockattn_rag.kv.rope import relative_error
from blockattn_rag.model.caches import RelayCache, copied_cache
from blockattn_rag.model.decoding import next_logits
from blockattn_rag.model.encoding import EncodeRequest, encode_batch
from blockattn_rag.model.probe import AttentionProfile, vocabulary_size
from blockattn_rag.model.relay_attention import enable_relay
from blockattn_rag.model.tolerances import LOGITS


def relay_is_exact(hf_model: PreTrainedModel, profile: AttentionProfile) -> bool:
    """Make a model ready for relay attention, and see whether it gives the copy path's logits.

    Windows, soft caps and attention sinks are ruled out beforehand, because a short probe might not
    show them.

    Raises:
        ValueError: autocast is on, or the model is in training mode.
    """
    config = hf_model.config.get_text_config(decoder=True)
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    sinks = any(name.endswith("sinks") for name, _ in hf_model.named_parameters())
    if capped or sinks or any(window is not None for window in profile.windows):
        return False
    enable_relay(hf_model)
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(vocabulary_size(hf_model), (3, 7), generator=generator)
    requests = [EncodeRequest(row.tolist(), str(index), "") for index, row in enumerate(rows[:2])]
    context = place(encode_batch(hf_model, requests, ""))
    layouts, width = profile.layouts, context.num_tokens
    # Small as they are, the blocks must be read one by one here.
    tuning = replace(tuning_of(hf_model.device), join_prefill_tokens=0, join_decode_tokens=0)
    for tokens in (7, 1):  # as in a prompt, and as in an answer
        final = rows[2:, :tokens]
        copied = copied_cache(hf_model.config, [context], layouts, width)
        expected = next_logits(hf_model, final, copied)
        plan = RelayPlan([context], layouts, hf_model.device, tuning=tuning)
        found = next_logits(hf_model, final, RelayCache(len(layouts), width, plan))
        if relative_error(found.float(), expected.float()) > LOGITS[hf_model.dtype]:
            return False
    return True
