"""Questions and passages that a recipe is fitted to. The model can generate the questions.

Files are plain or gzip JSON Lines. A question is ``{"question": str}``. Optional keys are
``"answers": [str, ...]``, the reference answers, and ``"passages": [{"title": str, "text": str,
"gold": bool}, ...]``, as in evaluation data; title and gold are optional. A passage is ``{"title":
str, "text": str}``, also with an optional title. Other keys are ignored.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blockattn_rag.engine import BlockAttentionEngine, Recipe
from blockattn_rag.errors import DataError
from blockattn_rag.lab.evaluation.datasets import (
    EvaluationPassage,
    answers_of,
    digest_of,
    passage_of,
    passages_of,
)
from blockattn_rag.lab.json_lines import JsonRecord, parsed_lines, required_text
from blockattn_rag.lab.repair.plan import Limits
from blockattn_rag.prompts import BlockPrompt, Passage, Span
from blockattn_rag.prompts.chat_template import Message, chat_spans, has_chat_template
from blockattn_rag.store.base import KVStore

Nearest = Callable[[str, int], Sequence[Passage]]
"""Function of a text and a number, which returns at most that many passages, the nearest first."""

_ASK = (
    "Here is a text.\n---------------------\n",
    "\n---------------------\nWrite one short question that this text answers. Name what it asks "
    "about, because the reader of the question does not see the text. Write the question alone, "
    "in one line.\nQuestion: ",
)
_MAX_NEW_TOKENS = 48
WRITTEN_AT_ONCE = 8
SEED = 0
_FEWEST_WORDS = 3
_QUOTES = " \t\"'*"


@dataclass(frozen=True, slots=True)
class Question:
    """A question with at least one passage for its prompts. The first passage is in every prompt:
    the passage that the question is about, or a retriever's best hit. The others are passages that
    a retriever would also return."""

    text: str
    passages: tuple[Passage, ...]
    answers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.text.strip() or not self.passages:
            raise DataError(
                f"Expected a question with at least one passage, found {self.text[:60]!r} with "
                f"{len(self.passages)} passages"
            )


@dataclass(frozen=True, slots=True)
class Material:
    """Data that a recipe is fitted to.

    Args:
        nearest: Function that retrieves passages for a question. None: all questions have their
            own passages.
        lender: Store that may already contain the passages' blocks. It is only read.
        in_use: The model's current recipe, if it has an adapter. It is kept unless another recipe
            is better.
    """

    prompt: Callable[[str, Sequence[Passage]], BlockPrompt]
    prompt_format: str
    passages: Sequence[Passage] = ()
    nearest: Nearest | None = None
    questions: Sequence[Question] | None = None
    lender: KVStore | None = None
    namespace: str = ""
    in_use: Recipe | None = None

    def inputs(self) -> dict[str, str]:
        inputs = {
            "passages": _digest(self.passages, [[p.title, p.text] for p in self.passages]),
            "prompt format": self.prompt_format,
            "questions": "written by the model",
            "recipe in use": str(self.in_use or "none with an adapter"),
        }
        if self.questions is not None:
            parts = [
                [q.text, q.answers, [[p.title, p.text] for p in q.passages]] for q in self.questions
            ]
            inputs["questions"] = _digest(self.questions, parts)
        return inputs


def _digest(counted: Sequence[Any], parts: Any) -> str:
    return f"{len(counted)} (sha256 {digest_of(parts)[:12]})"


def distinct_questions(questions: Sequence[Question], seed: int = SEED) -> list[Question]:
    """Deduplicate questions, ignoring case. The order depends only on their texts and the seed."""

    def digest(question: Question) -> str:
        return hashlib.sha256(question.text.encode("utf-8", "surrogatepass")).hexdigest()

    by_text = {question.text.casefold(): question for question in questions}
    ordered = sorted(by_text.values(), key=digest)
    random.Random(seed).shuffle(ordered)
    return ordered


def draw_samples(
    questions: Sequence[Question], count: int, fewest: int, most: int, seed: int
) -> list[Question]:
    """Draw ``count`` samples, cycling through the questions, each with randomly drawn passages. A
    sample has ``fewest`` to ``most`` passages in random order, always including the question's
    first passage. If a question has fewer than ``fewest``, its samples have all of them."""
    rng = random.Random(seed)
    samples = []
    for index in range(count):
        question = questions[index % len(questions)]
        first, *others = question.passages
        available = len(question.passages)
        size = rng.randint(min(fewest, available), min(most, available))
        shown = [first, *rng.sample(others, size - 1)]
        rng.shuffle(shown)
        samples.append(replace(question, passages=tuple(shown)))
    return samples


def read_passages(path: Path) -> list[Passage]:
    lines = parsed_lines(path, lambda record, _: _stripped(passage_of(record)))
    return list(dict.fromkeys(passage for _, passage in lines))


def read_questions(path: Path, nearest: Nearest | None, num_passages: int) -> list[Question]:
    """Read questions from a file. Each has the passages of its line, the gold ones first, or, if
    the line has none, the ``num_passages`` nearest."""

    def question(record: JsonRecord, _: int) -> Question:
        text = required_text(record, "question").strip()
        answers = answers_of(record, may_be_empty=True) if "answers" in record else ()
        if "passages" in record:
            gold_first = sorted(passages_of(record), key=lambda passage: not passage.gold)
            return Question(text, tuple(dict.fromkeys(map(_stripped, gold_first))), answers)
        if nearest is None:
            raise DataError(
                'A question has no passages; add "passages" to it, or pass a database '
                "(--db) or passages (--passages)"
            )
        return Question(text, tuple(nearest(text, num_passages)), answers)

    return [parsed for _, parsed in parsed_lines(path, question)]


def _stripped(passage: EvaluationPassage) -> Passage:
    return Passage(passage.title.strip(), passage.text.strip())


def write_questions(
    engine: BlockAttentionEngine,
    material: Material,
    limits: Limits,
    path: Path,
    on_progress: Callable[[int, int], None],
    time_is_up: Callable[[], bool] = lambda: False,
) -> list[Question]:
    """Generate up to ``limits.questions`` distinct questions, each about one passage. They are kept
    in the file ``path``, whose questions from an interrupted run are reused."""
    passages, count = list(dict.fromkeys(material.passages)), limits.questions
    if not passages or material.nearest is None:
        raise DataError("Found no questions or passages; pass --questions, --passages or --db")
    random.Random(SEED).shuffle(passages)
    written = _kept(path)
    questions: dict[str, Question] = {}
    tried = 0
    on_progress(0, count)
    while tried < len(passages) and len(questions) < count:
        batch = passages[tried : tried + min(WRITTEN_AT_ONCE, count - len(questions))]
        if time_is_up() and tried and not all(_name(passage) in written for passage in batch):
            break
        tried += len(batch)
        _write_missing(engine, batch, written, path)
        for passage in batch:
            text = written[_name(passage)]
            if text and text.lower() not in questions:
                near = material.nearest(text, limits.passages + 1)
                others = [other for other in near if other != passage][: limits.passages]
                questions[text.lower()] = Question(text, (passage, *others))
        on_progress(len(questions), count)
    if not questions:
        raise DataError(
            f"The model generated no usable question from {tried} passages; pass questions "
            "(--questions FILE)"
        )
    return list(questions.values())


def clean_question(text: str) -> str | None:
    """Return the question in a text's first line, without quotes. None if there is no question mark
    or there are fewer than three words."""
    line = next(iter(text.strip().splitlines()), "")
    question = line.partition("?")[0].strip(_QUOTES).removeprefix("Question:").strip(_QUOTES)
    is_one = "?" in line and len(question.split()) >= _FEWEST_WORDS
    return f"{question}?" if is_one else None


def _write_missing(
    engine: BlockAttentionEngine,
    passages: Sequence[Passage],
    written: dict[str, str | None],
    path: Path,
) -> None:
    missing = [passage for passage in passages if _name(passage) not in written]
    prompts = [_prompt(engine, passage) for passage in missing]
    answers = engine.generate_batch(prompts, mode="full", max_new_tokens=_MAX_NEW_TOKENS)
    with path.open("a", encoding="utf-8") as file:
        for passage, answer in zip(missing, answers, strict=True):
            name, question = _name(passage), clean_question(answer.text)
            written[name] = question
            file.write(json.dumps({"passage": name, "question": question}) + "\n")


def _prompt(engine: BlockAttentionEngine, passage: Passage) -> BlockPrompt:
    tokenizer = engine.model.tokenizer.tokenizer
    text = f"{passage.title}\n{passage.text}".strip()
    before, after = (Span(part, "system") for part in _ASK)
    spans: tuple[Span, ...] = (before, Span(text, "conversation"), after)
    if has_chat_template(tokenizer):
        messages: list[Message] = [{"role": "user", "content": spans}]
        spans = chat_spans(tokenizer, messages)
    return BlockPrompt((), "".join(span.text for span in spans), tuple(spans))


def _name(passage: Passage) -> str:
    text = json.dumps([passage.title, passage.text]).encode()
    return hashlib.sha256(text).hexdigest()


def _kept(path: Path) -> dict[str, str | None]:
    """Read generated questions by passage digest. Removes an incomplete last line from the file."""
    if not path.is_file():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    try:
        lines = [json.loads(line) for line in whole.splitlines()]
        return {str(line["passage"]): line["question"] for line in lines}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is damaged ({error!r}); delete {path.parent} to start again"
        ) from error
