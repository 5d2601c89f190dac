"""Audits: some of block mode's answers are compared with full mode, while nothing else waits.

Full mode reads the prompt and is given the answer token by token (teacher forcing): the audit sees
at which tokens it would have chosen another one. This is background work of the model's thread, in
steps. A request that comes meanwhile waits for one step, and the audit goes on when all are served.
While it is under way it holds the keys and values of one prompt.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import cast
from weakref import WeakSet

import torch
from transformers import DynamicCache

from blockattn_rag.engine.answer import Answer
from blockattn_rag.engine.results import Certificate, Generation
from blockattn_rag.model import BlockModel
from blockattn_rag.model.constraint import restricted
from blockattn_rag.model.decoding import batches_exactly, draws_tokens
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.prompts.blocks import BlockPrompt

logger = logging.getLogger("blockattn_rag")

_MOST_PENDING = 4
_STEP_S = 0.1
"""How long a step shall take."""
_STEP_TOKENS = 16, 512
"""A step has so many tokens at least, and at most. The first one has as many as the least."""
_LAST = 50
"""So many audits are compared with the certificates of their answers."""


@dataclass(frozen=True, slots=True)
class AuditStats:
    """What the audits of an engine have found so far.

    Args:
        audited: answers that were compared with full mode.
        identical: of these, answers of which full mode would choose every token.
        agreement: share of an answer's tokens that full mode would choose after the same tokens,
            mean over answers; None before the first audit.
        pending: audits that wait or are under way.
        dropped: answers that were drawn and not compared, because too many waited, or because the
            model was set otherwise or trained meanwhile.
        failed: audits that ended with an error, which was logged.
    """

    audited: int = 0
    identical: int = 0
    agreement: float | None = None
    pending: int = 0
    dropped: int = 0
    failed: int = 0


class Auditor:
    """Audits answers of one engine.

    Args:
        model: the model.
        rate: share of answers to audit, from 0 to 1; which ones is drawn anew by each auditor, so
            that the answers of short processes are audited too.
        submit: takes the steps of background work; see ``Scheduler.submit_in_background``.

    Raises:
        ValueError: another rate.
    """

    def __init__(
        self, model: BlockModel, rate: float, submit: Callable[[Iterator[None]], None]
    ) -> None:
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate <= 1:
            raise ValueError(f"audit_rate must be a number from 0 to 1; found {rate!r}")
        self._model = model
        self._rate = rate
        self._submit = submit
        self._lock = threading.Lock()
        self._draws = random.Random()
        self._pending: WeakSet[Iterator[None]] = WeakSet()
        self._audited = self._identical = self._dropped = self._failed = 0
        self._agreement = 0.0  # sum
        # How far the last audits were above what their answers' certificates promise.
        self._above: deque[float] = deque(maxlen=_LAST)
        self._told_of_processing = False

    @property
    def stats(self) -> AuditStats:
        """What was found so far."""
        with self._lock:
            return AuditStats(
                self._audited,
                self._identical,
                self._agreement / self._audited if self._audited else None,
                len(self._pending),
                self._dropped,
                self._failed,
            )

    def offer(self, answer: Answer) -> None:
        """Audit an answer that was given, if it is drawn."""
        if not (self._rate and self._can_judge(answer)):
            return
        with self._lock:
            drawn = self._draws.random() < self._rate
            has_room = len(self._pending) < _MOST_PENDING
            self._dropped += drawn and not has_room
        if not (drawn and has_room):
            return
        generation = cast("Generation", answer.generation)
        sampling = answer.options.sampling
        # A certificate speaks of answers that follow no grammar.
        certificate = None if sampling.grammar else generation.stats.certificate
        answered = (answer.prompt, generation.token_ids, sampling)
        try:
            steps = self._audit(*answered, certificate, self._model.fingerprint)
            self._pending.add(steps)
            self._submit(steps)
        except (RuntimeError, ValueError) as error:  # no thread, or a model that is being trained
            logger.warning("an answer is not audited: %s", error)
            with self._lock:
                self._dropped += 1

    def _can_judge(self, answer: Answer) -> bool:
        """Whether the answer was chosen greedily by block mode, and by nothing but the logits."""
        options, generation = answer.options, answer.generation
        was_given = generation is not None and bool(generation.token_ids) and not answer.abstained
        is_block = options.mode == "block" and bool(answer.prompt.context)
        if not (was_given and is_block) or draws_tokens(options.sampling):
            return False
        if batches_exactly(self._model.hf_model, options.sampling):
            return True
        self._tell_of_processing()
        return False

    def _tell_of_processing(self) -> None:
        """Say once that audit_rate does nothing where a model's own settings change its logits."""
        with self._lock:
            told, self._told_of_processing = self._told_of_processing, True
        if not told:
            logger.warning(
                "an answer is not audited: its tokens are chosen by more than what the model "
                "predicts there, such as a repetition penalty or beams, in its generation config "
                "or among the options of the call. audit_rate=%g does nothing for such answers",
                self._rate,
            )

    def _audit(
        self,
        prompt: BlockPrompt,
        answer_ids: Sequence[int],
        sampling: Sampling,
        certificate: Certificate | None,
        fingerprint: str,
    ) -> Iterator[None]:
        """The steps of one audit."""
        try:
            chosen = yield from self._chosen(prompt, answer_ids, sampling, fingerprint)
        except Exception as error:  # noqa: BLE001 -- nobody waits for it
            with self._lock:
                self._failed += 1
            logger.warning("an audit failed: %r", error)
            return
        if chosen is None:
            with self._lock:
                self._dropped += 1
            return
        same = [one == other for one, other in zip(chosen, answer_ids, strict=True)]
        agreement = sum(same) / len(same)
        with self._lock:
            self._audited += 1
            self._identical += all(same)
            self._agreement += agreement
        logger.info(
            "audit: full mode would choose %.1f %% of an answer's %d tokens%s",
            100 * agreement,
            len(same),
            "" if all(same) else f"; token {same.index(False)} is the first that it would not",
        )
        if certificate is not None:
            self._compare(agreement, certificate)

    def _chosen(
        self,
        prompt: BlockPrompt,
        answer_ids: Sequence[int],
        sampling: Sampling,
        fingerprint: str,
    ) -> Generator[None, None, list[int] | None]:
        """What full mode would choose at each token of an answer; None if the model has changed."""
        model = self._model
        matcher = model.matcher(sampling.grammar)
        ids = model.tokenizer.prompt_ids(prompt).flat
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        chosen: list[int] = []
        at, tokens = 0, _STEP_TOKENS[0]
        while len(chosen) < len(answer_ids):
            if model.hf_model.training or model.fingerprint != fingerprint:
                return None
            began = time.perf_counter()
            if at < len(ids) - 1:
                part = ids[at : min(at + tokens, len(ids) - 1)]
                at += len(part)
                # The next token is read, so that a GPU has done its work when the step ends.
                model.next_logits(torch.tensor([part]), cache).argmax().item()
            else:
                done = len(chosen)
                before = answer_ids[done - 1] if done else ids[-1]
                given = answer_ids[done : done + tokens]
                scores = model.answer_logits((), [before], given, cache)
                if matcher is not None:
                    rows = [answer_ids[:at] for at in range(done, done + len(given))]
                    matchers = [matcher] * len(rows)
                    scores = restricted(scores, rows, matchers, model.end_ids(sampling))
                chosen += scores.argmax(-1).tolist()
            tokens = _fitting(tokens, time.perf_counter() - began)
            yield
        return chosen

    def _compare(self, agreement: float, certificate: Certificate) -> None:
        """Warn when the last audits are clearly below what the answers' certificates promise."""
        self._above.append(agreement - certificate.agreement_low)
        if len(self._above) < _LAST:
            return
        most = mean(self._above) + 1.96 * stdev(self._above) / math.sqrt(_LAST)
        if most >= 0:
            return
        logger.warning(
            "audits: over the last %d answers, full mode would choose a share of the tokens that "
            "is %.1f percentage points below the certificates of these answers (at least %.1f). "
            "Calibrate anew on questions like these: `blockattn-rag calibrate`.",
            _LAST,
            -100 * mean(self._above),
            -100 * most,
        )
        self._above.clear()  # to warn again after as many


def _fitting(tokens: int, seconds: float) -> int:
    """Tokens of the next step, after one of this size took so long."""
    least, most = _STEP_TOKENS
    return max(least, min(most, int(tokens * _STEP_S / max(seconds, 1e-6))))
