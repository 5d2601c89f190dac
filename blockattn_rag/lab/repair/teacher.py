"""The teacher: the model itself in full mode. Its answers are computed once and kept in files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from blockattn_rag.errors import ContextOverflowError
from blockattn_rag.files import replacing
from blockattn_rag.lab.repair.divergence import TopPredictions, top_predictions
from blockattn_rag.model import BlockModel
from blockattn_rag.model.greedy import greedy_answers
from blockattn_rag.prompts.blocks import BlockPrompt


class TeacherAnswer(NamedTuple):
    """A greedy answer, int64 ``[n]``, and what the model predicted at each of its tokens."""

    ids: Tensor
    predictions: TopPredictions


class Teacher:
    """Full mode's answers to prompts.

    An answer's file is named after all that decides the answer, and is there whole or not at all:
    a run that was interrupted goes on with what is there.

    Args:
        model: the model.
        folder: where answers are kept; made if it does not exist.
        max_new_tokens: longest answer.
        top_k: likeliest tokens that are kept at each token of an answer.
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
        """Compute the answers that are not there yet; how many those were.

        Args:
            on_progress: called with the answers that are there and all answers.

        Raises:
            ContextOverflowError: a prompt leaves no room for the longest answer.
        """
        flat = (self._model.tokenizer.prompt_ids(prompt).flat for prompt in prompts)
        wanted = {self._path(ids): ids for ids in map(list, flat)}
        for ids in wanted.values():
            self._check_room(len(ids))
        missing = [ids for path, ids in wanted.items() if _read(path) is None]
        done = len(wanted) - len(missing)
        for batch in _batches(missing, self._model.batch_tokens):
            on_progress(done, len(wanted))
            for ids, answer in zip(batch, self._compute(batch), strict=True):
                self._keep(self._path(ids), answer)
            done += len(batch)
        on_progress(done, len(wanted))
        return len(missing)

    def __call__(self, prompt: BlockPrompt) -> TeacherAnswer:
        """The answer to a prompt, computed if it is not there or its file is damaged."""
        ids = list(self._model.tokenizer.prompt_ids(prompt).flat)
        answer = _read(self._path(ids))
        if answer is None:
            self._check_room(len(ids))
            (answer,) = self._compute([ids])
            self._keep(self._path(ids), answer)
        return answer

    def _path(self, ids: Sequence[int]) -> Path:
        told = json.dumps([*self._made_by, *ids]).encode()
        return self._folder / f"{hashlib.sha256(told).hexdigest()}.safetensors"

    def _check_room(self, tokens: int) -> None:
        most = self._model.max_context_tokens
        if tokens + self._max_new_tokens > most:
            raise ContextOverflowError(
                f"a prompt of {tokens} tokens and an answer of {self._max_new_tokens} do not fit "
                f"in the model's {most}; show fewer or shorter passages"
            )

    def _keep(self, path: Path, answer: TeacherAnswer) -> None:
        tensors = {
            "ids": answer.ids,
            "tokens": answer.predictions.tokens.int(),
            "log_probs": answer.predictions.log_probs,
        }
        with replacing(path) as file:
            file.write(save({name: tensor.contiguous() for name, tensor in tensors.items()}))

    def _compute(self, batch: Sequence[list[int]]) -> list[TeacherAnswer]:
        answers = []
        for ids, logits in greedy_answers(self._model, batch, self._max_new_tokens):
            found = top_predictions(logits, self._top_k)
            kept = TopPredictions(*(tensor.cpu() for tensor in found))
            answers.append(TeacherAnswer(ids.cpu(), kept))
        return answers


def _read(path: Path) -> TeacherAnswer | None:
    """The answer in a file; None where there is none, or what is there is damaged."""
    try:
        found = load_file(path)
        predictions = TopPredictions(found["tokens"].long(), found["log_probs"])
        return TeacherAnswer(found["ids"], predictions)
    except (FileNotFoundError, SafetensorError, KeyError):
        return None


def _batches(prompts: Sequence[list[int]], budget: int) -> Iterator[list[list[int]]]:
    """Prompts of similar length together, longest first, up to ``budget`` tokens with padding."""
    order = sorted(prompts, key=len, reverse=True)
    while order:
        rows = max(1, budget // len(order[0]))
        yield order[:rows]
        order = order[rows:]
