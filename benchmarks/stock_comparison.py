"""Modes of ``stock_models.py``: which model and which prompts they are, compared with full mode."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import typer
from sparse_recomputation import recomputed_logits
from stock_records import FULL, Row
from torch import Tensor

from blockattn_rag import BlockAttentionEngine, MemoryStore
from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.evaluation import EvaluationSample
from blockattn_rag.evaluation.fidelity import FidelityRecord, compare_modes
from blockattn_rag.evaluation.metrics import contains_answer, f1_score
from blockattn_rag.evaluation.modes import engine_for, mode_options
from blockattn_rag.evaluation.run import make_prompt
from blockattn_rag.model.greedy import greedy_answers
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.formats import CHAT
from blockattn_rag.prompts.sinks import FIRST_BLOCK
from blockattn_rag.store import KVStore

RECOMPUTE, MODEL = "recompute", "model"
_STORE_BYTES = 4 << 30


class Parts(NamedTuple):
    """A mode's name: ``recompute`` or ``model`` with its value, or nothing, and the mode of
    ``blockattn-rag eval`` that follows."""

    own: str
    value: str
    rest: str

    @classmethod
    def of(cls, mode: str) -> Parts:
        """Raises ``typer.BadParameter`` if there is no such mode."""
        first, _, behind = mode.partition("+")
        own, _, value = first.partition("=")
        found = (
            cls(own, value, behind or "block") if own in (RECOMPUTE, MODEL) else cls("", "", mode)
        )
        try:
            is_block = mode_options(found.rest)["mode"] == "block"
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        if found.own and not is_block:
            raise typer.BadParameter(f"found {behind!r} in {mode!r}, expected a block mode")
        if found.own == RECOMPUTE and not found.value.isdecimal():
            raise typer.BadParameter(f"found {first!r}, expected a number of tokens: recompute=16")
        return found


class Comparison:
    """Several questions at once: full mode's answers, then each mode beside them.

    Args:
        engines: by mode, of ``engines_of``.
        tokens: longest answer.
        setups: by mode, of ``_setup``.
    """

    def __init__(
        self,
        engines: Mapping[str, BlockAttentionEngine],
        samples: Sequence[EvaluationSample],
        tokens: int,
        setups: Mapping[str, str],
    ) -> None:
        self._engines, self._samples, self._most = engines, samples, tokens
        self._stock = engines[FULL]
        self._setups = setups
        self._prompts = [make_prompt(self._stock, CHAT, sample, FULL) for sample in samples]
        answers = full_answers(self._stock, self._prompts, tokens)
        self._answers = [answer.tolist() for answer, _ in answers]
        self._expected = [torch.log_softmax(logits.double(), -1) for _, logits in answers]

    def full(self) -> list[Row]:
        """Full mode's own scores; it does not diverge from itself."""
        texts = [text_of(self._stock, answer) for answer in self._answers]
        compared = [
            Row(sample.id, FULL, self._setups[FULL], len(answer), 0.0, 0.0, 1.0)
            for sample, answer in zip(self._samples, self._answers, strict=True)
        ]
        return self._scored(compared, texts)

    def rows(self, mode: str, answers_too: bool) -> list[Row]:
        self._encode(mode)
        found = [self._compared(index, mode) for index in range(len(self._samples))]
        setup = self._setups[mode]
        rows = [
            Row(one.id, mode, setup, one.tokens, one.kl, one.first_kl, one.agreement)
            for one in found
        ]
        if not answers_too:
            return rows
        rest = Parts.of(mode).rest
        given = self._engines[mode].generate_batch(
            [make_prompt(self._stock, CHAT, sample, rest) for sample in self._samples],
            **mode_options(rest),
            max_new_tokens=self._most,
            batch_size=len(self._samples),
        )
        return self._scored(rows, [answer.text for answer in given])

    def _compared(self, index: int, mode: str) -> FidelityRecord:
        sample, prompt = self._samples[index], self._prompts[index]
        answer, expected = self._answers[index], self._expected[index]
        engine, (own, value, rest) = self._engines[mode], Parts.of(mode)
        if own == RECOMPUTE:
            how = GenerateOptions.parse(mode_options(rest), GenerateOptions())
            logits = recomputed_logits(engine, prompt, answer, how, int(value))
            return FidelityRecord.compared(sample, mode, logits, expected)

        def prompt_in(name: str) -> BlockPrompt:
            return make_prompt(self._stock, CHAT, sample, name)

        (record,) = compare_modes(engine, sample, [rest], prompt_in, answer, expected)
        return record

    def _encode(self, mode: str) -> None:
        """The blocks of all questions, together where they are the same in every prompt."""
        engine, how = self._engines[mode], mode_options(Parts.of(mode).rest)
        if how["mode"] != "block":
            return
        encoded = {name: how[name] for name in ("sink", "correction")}
        if encoded["sink"] == FIRST_BLOCK:
            for prompt in self._prompts:
                engine.precompute(prompt.context, as_prompt=True, **encoded)
            return
        passages = [b for prompt in self._prompts for b in prompt.context if b.is_passage]
        engine.precompute(passages, **encoded)

    def _scored(self, rows: Sequence[Row], texts: Sequence[str]) -> list[Row]:
        return [
            replace(
                row,
                accuracy=contains_answer(text, sample.answers),
                f1=f1_score(text, sample.answers),
            )
            for row, text, sample in zip(rows, texts, self._samples, strict=True)
        ]


def full_answers(
    engine: BlockAttentionEngine, prompts: Sequence[BlockPrompt], tokens: int
) -> list[tuple[Tensor, Tensor]]:
    """Full mode's answers, as ``greedy_answers``."""
    ids = [engine.model.tokenizer.prompt_ids(prompt).flat for prompt in prompts]
    return greedy_answers(engine.model, ids, tokens)


def text_of(engine: BlockAttentionEngine, answer: Sequence[int]) -> str:
    text: str = engine.model.tokenizer.tokenizer.decode(answer, skip_special_tokens=True)
    return text


def _engine(model: str, store: KVStore) -> BlockAttentionEngine:
    """An engine in which each mode computes all of its own answer, without `engine.tails`."""
    logging.getLogger("blockattn_rag").setLevel(logging.ERROR)
    return BlockAttentionEngine.from_pretrained(model, store=store, resident_bytes=0)


def engines_of(model: str, modes: Sequence[str]) -> dict[str, BlockAttentionEngine]:
    """The engines of full mode and of each mode, over one store; each model is loaded once.

    Raises:
        typer.BadParameter: a mode's model has another tokenizer than the stock model.
    """
    store = MemoryStore(_STORE_BYTES)
    stock = _engine(model, store)
    by_folder, by_mode = {"": stock}, {FULL: stock}
    for mode in modes:
        own, value, rest = Parts.of(mode)
        folder = value if own == MODEL else ""
        if folder not in by_folder:
            by_folder[folder] = _engine(folder, store)
        by_mode[mode] = engine_for(by_folder[folder], rest)
        if by_mode[mode].model.tokenizer.fingerprint != stock.model.tokenizer.fingerprint:
            raise typer.BadParameter(
                f"the tokenizer in {folder} is not that of {model}, along whose answers modes are "
                "compared token by token; expected a model that was fine-tuned from it"
            )
    return by_mode
