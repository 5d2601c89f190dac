"""Full mode's greedy answers, with what the model predicts at each of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from blockattn_rag.model.block_model import BlockModel


def greedy_answers(
    model: BlockModel, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[tuple[Tensor, Tensor]]:
    """Answers to prompts that share one run of transformers' ``generate``, padded on the left.

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
    with model.lock, torch.inference_mode():
        run: Any = model.hf_model.generate
        out = run(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            use_cache=True,
            eos_token_id=sorted(ends) or None,
            pad_token_id=min(ends, default=0),
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.stack(out.logits, dim=1)  # [rows, answer tokens, vocab]
        answers = out.sequences[:, ids.shape[1] :]
        lengths = [_length(row.tolist(), ends) for row in answers]
    return [(a[:n], of[:n]) for a, of, n in zip(answers, logits, lengths, strict=True)]


def _length(ids: Sequence[int], ends: set[int]) -> int:
    """Tokens of a row up to its end; padding follows."""
    return next((at for at, token in enumerate(ids) if token in ends), len(ids) - 1) + 1
