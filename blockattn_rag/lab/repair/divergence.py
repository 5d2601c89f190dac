"""The loss of a fit: divergence of predictions, of which the likeliest tokens are kept."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class TopPredictions(NamedTuple):
    """Predictions of which the ``k`` likeliest tokens are kept, and the mass of all others.

    ``tokens``: int64 ``[n, k]``, likeliest first; ``log_probs``: float32 ``[n, k + 1]``, those of
    ``tokens``, then that of all other tokens together.
    """

    tokens: Tensor
    log_probs: Tensor


def top_predictions(logits: Tensor, k: int) -> TopPredictions:
    """The likeliest tokens of logits ``[n, vocab]``: ``k``, or one less than there are."""
    tokens = logits.topk(min(k, logits.shape[-1] - 1), dim=-1).indices
    return TopPredictions(tokens, log_probs_at(logits, tokens))


def log_probs_at(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities ``[n, k + 1]`` of ``tokens`` ``[n, k]``, and of all others together.

    The last is summed over the others themselves: one less the sum of the kept would be rounding
    alone where they hold nearly all, and its gradient would have no bound.
    """
    logits = logits.float()
    others = logits.scatter(-1, tokens, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logits.gather(-1, tokens), others], dim=-1) - logits.logsumexp(
        -1, keepdim=True
    )


def divergence(teacher: TopPredictions, logits: Tensor) -> Tensor:
    """Kullback-Leibler divergence (teacher || student) in nats, ``[n]``, of the kept tokens and the
    others as one; at most the divergence over the whole vocabulary.

    Args:
        logits: the student's, ``[n, vocab]``.
    """
    found = log_probs_at(logits, teacher.tokens)
    return F.kl_div(found, teacher.log_probs, reduction="none", log_target=True).sum(-1)


def answer_loss(per_token: Tensor, first_token_weight: float) -> Tensor:
    """Weighted mean of divergences along an answer, ``[n]``.

    Args:
        first_token_weight: weight of the first token, where that of the others is 1: what an
            answer is about, and whether one is given at all, is mostly decided there.
    """
    weights = torch.ones_like(per_token)
    weights[0] = first_token_weight
    return (per_token * weights).sum() / weights.sum()
