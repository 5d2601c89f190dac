"""Full mode's greedy answers, with what the model predicts at each of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from blockattn_rag.model.block_model import BlockModel

# `generate` compares these with numbers, so they cannot be None.
_ONE_ANSWER = {"num_beams": 1, "num_return_sequences": 1}


def greedy_answers(
    model: BlockModel, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[tuple[Tensor, Tensor]]:
    """Answers to prompts that share one run of transformers' ``generate``, padded on the left.

    Each token is the likeliest one, also where the model's generation config asks for penalties,
    beams or the like: the logits tell what the model predicts, and the answer follows from them.

    Args:
        model: the model.
        prompts: token ids, at least one each; with the answer they fit in the context window.
        max_new_tokens: longest answer.

    Returns:
        For each prompt its answer, the token that ends it included, int64 ``[n]``, and the logits
        ``[n, vocab]`` of the answer's tokens, before any processing; on the model's device.
    """
    rows = [torch.tensor(ids) for ids in prompts]
    ends = model.end_token_ids
    ids = pad_sequence(rows, batch_first=True, padding_side="left")
    mask = pad_sequence([torch.ones_like(r) for r in rows], True, padding_side="left")
    arguments = _unset(model.hf_model) | {
        "max_new_tokens": max_new_tokens,
        "do_sample": False,
        "use_cache": True,
        "eos_token_id": sorted(ends) or None,
        "pad_token_id": min(ends, default=0),
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    with model.lock, torch.inference_mode():
        run: Any = model.hf_model.generate
        out = run(ids.to(model.device), attention_mask=mask.to(model.device), **arguments)
        logits = torch.stack(out.logits, dim=1)  # [rows, answer tokens, vocab]
        answers = out.sequences[:, ids.shape[1] :]
        lengths = [_length(row.tolist(), ends) for row in answers]
    return [(a[:n], of[:n]) for a, of, n in zip(answers, logits, lengths, strict=True)]


def _unset(hf_model: PreTrainedModel) -> dict[str, Any]:
    """Arguments of ``generate`` that undo what the model's generation config sets."""
    # `generate` fills what is missing from that config, so a config of our own would not do.
    return dict.fromkeys(hf_model.generation_config.to_diff_dict()) | _ONE_ANSWER


def _length(ids: Sequence[int], ends: set[int]) -> int:
    """Tokens of a row up to its end; padding follows."""
    return next((at for at, token in enumerate(ids) if token in ends), len(ids) - 1) + 1
