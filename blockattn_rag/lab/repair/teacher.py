"""The teacher, which is the model in full mode, and the divergence of predictions from the teacher.

Answers are computed once and stored in files, with the likeliest tokens at each answer token.
"""

from __future__ import annotations

import hashlib
import json
import time
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
    """The ``k`` likeliest tokens at each position, and the mass of all others.

    Args:
        tokens: int64 ``[n, k]``, likeliest first.
        log_probs: float32 ``[n, k + 1]``. The last column is for all other tokens together.
    """

    tokens: Tensor
    log_probs: Tensor

    def to(self, device: torch.device | str) -> TopPredictions:
        return TopPredictions(*(tensor.to(device) for tensor in self))


def top_predictions(logits: Tensor, k: int) -> TopPredictions:
    """The ``k`` likeliest tokens for logits ``[n, vocab]``, at most ``vocab - 1``."""
    tokens = logits.topk(min(k, logits.shape[-1] - 1), dim=-1).indices
    return TopPredictions(tokens, log_probs_at(logits, tokens))


def log_probs_at(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities ``[n, k + 1]`` of ``tokens`` ``[n, k]``, and of all others together.

    The last column is computed as a sum over the other tokens. Computed as one minus the sum over
    ``tokens``, it would be only rounding when these have nearly all the mass, and its gradient
    would be unbounded.
    """
    logits = logits.float()
    others = logits.scatter(-1, tokens, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logits.gather(-1, tokens), others], dim=-1) - logits.logsumexp(
        -1, keepdim=True
    )


def divergence(teacher: TopPredictions, logits: Tensor) -> Tensor:
    """Kullback-Leibler divergence (teacher || student) in nats, ``[n]``.

    All tokens outside the top k count as one token, so the result is a lower bound of the
    divergence over the vocabulary.

    Args:
        teacher: The teacher's predictions, on any device.
        logits: The student's logits ``[n, vocab]``.
    """
    tokens, log_probs = teacher.to(logits.device)
    student = log_probs_at(logits, tokens)
    return F.kl_div(student, log_probs, reduction="none", log_target=True).sum(-1)


def answer_loss(per_token: Tensor) -> Tensor:
    """Mean of the divergences ``[n]`` of an answer's tokens, with the first token counted twice.

    The first token often decides what an answer says, and whether the model answers at all.
    """
    return (per_token.sum() + per_token[0]) / (len(per_token) + 1)


class TeacherAnswer(NamedTuple):
    """A greedy answer, int64 ``[n]``, and the model's predictions at each token."""

    ids: Tensor
    predictions: TopPredictions


class Teacher:
    """Answers prompts in full mode, and stores the answers in files.

    The name of a file is a digest of everything that the answer depends on. Files are created only
    when complete, so an interrupted run resumes with the existing answers.
    """

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
        """Compute the missing answers, and return their number."""
        flat = (self._model.tokenizer.prompt_ids(prompt).flat for prompt in prompts)
        by_path = {self._path(ids): ids for ids in map(list, flat)}
        for ids in by_path.values():
            self._check_room(len(ids))
        missing = [ids for path, ids in by_path.items() if _read(path) is None]
        done = len(by_path) - len(missing)
        for batch in _batches(missing, self._model.batch_tokens):
            on_progress(done, len(by_path))
            for ids, answer in zip(batch, self.compute(batch), strict=True):
                self._keep(self._path(ids), answer)
            done += len(batch)
        on_progress(done, len(by_path))
        return len(missing)

    def __call__(self, prompt: BlockPrompt) -> TeacherAnswer:
        ids = list(self._model.tokenizer.prompt_ids(prompt).flat)
        answer = _read(self._path(ids))
        if answer is None:
            self._check_room(len(ids))
            (answer,) = self.compute([ids])
            self._keep(self._path(ids), answer)
        return answer

    def seconds(self, prompt: BlockPrompt) -> float:
        """Measure the seconds of an answer, which is computed even if its file exists."""
        ids = list(self._model.tokenizer.prompt_ids(prompt).flat)
        self._check_room(len(ids))
        started = time.monotonic()
        (answer,) = self.compute([ids])
        seconds = time.monotonic() - started
        self._keep(self._path(ids), answer)
        return seconds

    def _path(self, ids: Sequence[int]) -> Path:
        text = json.dumps([*self._made_by, *ids]).encode()
        return self._folder / f"{hashlib.sha256(text).hexdigest()}.safetensors"

    def _check_room(self, tokens: int) -> None:
        most = self._model.max_context_tokens
        if tokens + self._max_new_tokens > most:
            raise ContextOverflowError(
                f"A prompt of {tokens} tokens and an answer of {self._max_new_tokens} do not fit "
                f"in the context window of {most} tokens; use fewer or shorter passages"
            )

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
    """Read the answer in a file. None: the file is missing or damaged."""
    try:
        tensors = load_file(path)
        predictions = TopPredictions(tensors["tokens"].long(), tensors["log_probs"])
        return TeacherAnswer(tensors["ids"], predictions)
    except (FileNotFoundError, SafetensorError, KeyError):
        return None


def _batches(prompts: Sequence[list[int]], budget: int) -> Iterator[list[list[int]]]:
    """Batch prompts of similar length, longest first, up to ``budget`` tokens including padding."""
    order = sorted(prompts, key=len, reverse=True)
    while order:
        rows = max(1, budget // len(order[0]))
        yield order[:rows]
        order = order[rows:]
