"""Teacher: the model in full mode, and the divergence of predictions from the teacher's.

Answers are generated once and stored in files, with the most likely tokens at each position.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn import functional as F

from blockattn_rag.errors import ContextOverflowError
from blockattn_rag.files import replacing
from blockattn_rag.model import BlockModel
from blockattn_rag.model.decoding import greedy_answers
from blockattn_rag.prompts.blocks import BlockPrompt


class TopPredictions(NamedTuple):
    """The ``k`` most likely tokens at each position, and the probability mass of all others.

    Args:
        tokens: int64 ``[n, k]``, most likely first.
        log_probs: float32 ``[n, k + 1]``. The last column is for all other tokens together.
    """

    tokens: Tensor
    log_probs: Tensor

    def to(self, device: torch.device | str) -> TopPredictions:
        return TopPredictions(*(tensor.to(device) for tensor in self))


def top_predictions(logits: Tensor, k: int) -> TopPredictions:
    """Return the ``k`` most likely tokens (at most ``vocab - 1``) for logits ``[n, vocab]``."""
    tokens = logits.topk(min(k, logits.shape[-1] - 1), dim=-1).indices
    return TopPredictions(tokens, log_probs_at(logits, tokens))


def log_probs_at(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return log-probabilities ``[n, k + 1]`` of ``tokens`` ``[n, k]``, and of all others together.
    The last column sums up the other tokens' probabilities. If ``tokens`` have nearly all the mass,
    1 minus their sum would consist mostly of rounding errors, and have an unbounded gradient."""
    logits = logits.float()
    others = logits.scatter(-1, tokens, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logits.gather(-1, tokens), others], dim=-1) - logits.logsumexp(
        -1, keepdim=True
    )


def divergence(teacher: TopPredictions, logits: Tensor) -> Tensor:
    """Compute the Kullback-Leibler divergence (teacher || student) in nats, ``[n]``.

    Tokens outside the top k count as one token, so the result is a lower bound of the divergence
    over the full vocabulary. ``logits``: The student's, ``[n, vocab]``.
    """
    tokens, log_probs = teacher.to(logits.device)
    student = log_probs_at(logits, tokens)
    return F.kl_div(student, log_probs, reduction="none", log_target=True).sum(-1)


def answer_loss(per_token: Tensor) -> Tensor:
    """Return the mean of an answer's divergences ``[n]``, with the first token counted twice. The
    first token often determines the content of an answer, and whether the model answers at all."""
    return (per_token.sum() + per_token[0]) / (len(per_token) + 1)


class TeacherAnswer(NamedTuple):
    """Greedy answer, int64 ``[n]``, and the model's predictions at each token."""

    ids: Tensor
    predictions: TopPredictions


class Teacher:
    """Model in full mode, whose answers are stored in files. File names are digests of everything
    that answers depend on, so that an interrupted run resumes with the existing answers."""

    def __init__(self, model: BlockModel, folder: Path, max_new_tokens: int, top_k: int) -> None:
        self._model = model
        self._folder = folder
        self._max_new_tokens = max_new_tokens
        self._top_k = top_k
        self._made_by = [model.fingerprint, max_new_tokens, top_k]
        folder.mkdir(parents=True, exist_ok=True)

    def answer_all(
        self, prompts: Iterable[BlockPrompt], on_progress: Callable[[int, int], None]
    ) -> int:
        """Generate the missing answers, and return their number."""
        by_path = {self._path(ids): ids for ids in map(self._ids, prompts)}
        missing = [ids for path, ids in by_path.items() if _read(path) is None]
        done = len(by_path) - len(missing)
        for batch in _batches(missing, self._model.batch_tokens):
            on_progress(done, len(by_path))
            self._generate(batch)
            done += len(batch)
        on_progress(done, len(by_path))
        return len(missing)

    def __call__(self, prompt: BlockPrompt) -> TeacherAnswer:
        return _read(self._path(self._ids(prompt))) or self.renew(prompt)

    def renew(self, prompt: BlockPrompt) -> TeacherAnswer:
        """Generate an answer, even if its file exists."""
        (answer,) = self._generate([self._ids(prompt)])
        return answer

    def _generate(self, batch: Sequence[list[int]]) -> list[TeacherAnswer]:
        answers = self.compute(batch)
        for ids, answer in zip(batch, answers, strict=True):
            self._keep(self._path(ids), answer)
        return answers

    def _ids(self, prompt: BlockPrompt) -> list[int]:
        """Token ids of a prompt. Raises ``ContextOverflowError`` if an answer would not fit."""
        ids = list(self._model.tokenizer.prompt_ids(prompt).flat)
        most = self._model.max_context_tokens
        if len(ids) + self._max_new_tokens > most:
            raise ContextOverflowError(
                f"A prompt of {len(ids)} tokens with an answer of {self._max_new_tokens} tokens "
                f"does not fit in the context window of {most} tokens; use fewer or shorter "
                "passages"
            )
        return ids

    def _path(self, ids: Sequence[int]) -> Path:
        text = json.dumps([*self._made_by, *ids]).encode()
        return self._folder / f"{hashlib.sha256(text).hexdigest()}.safetensors"

    def _keep(self, path: Path, answer: TeacherAnswer) -> None:
        tensors = {
            "ids": answer.ids,
            "tokens": answer.predictions.tokens.int(),
            "log_probs": answer.predictions.log_probs,
        }
        with replacing(path) as file:
            file.write(save({name: tensor.contiguous() for name, tensor in tensors.items()}))

    def compute(self, batch: Sequence[list[int]]) -> list[TeacherAnswer]:
        answers = []
        model = self._model
        with model.lock:
            run = model.hf_model, model.tokenizer.tokenizer
            generated = greedy_answers(*run, batch, self._max_new_tokens)
        for ids, logits in generated:
            kept = top_predictions(logits, self._top_k).to("cpu")
            answers.append(TeacherAnswer(ids.cpu(), kept))
        return answers


def _read(path: Path) -> TeacherAnswer | None:
    """Read an answer from a file, or return None if the file is missing or damaged."""
    try:
        tensors = load_file(path)
        predictions = TopPredictions(tensors["tokens"].long(), tensors["log_probs"])
        return TeacherAnswer(tensors["ids"], predictions)
    except (FileNotFoundError, SafetensorError, KeyError):
        return None


def _batches(prompts: Sequence[list[int]], budget: int) -> Iterator[list[list[int]]]:
    """Batch prompts by length, longest first, with up to ``budget`` tokens including padding."""
    order = sorted(prompts, key=len, reverse=True)
    while order:
        rows = max(1, budget // len(order[0]))
        yield order[:rows]
        order = order[rows:]
