"""Questions that the model writes itself, one from each of some passages."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.errors import DataError
from blockattn_rag.prompts.blocks import BlockPrompt, Span
from blockattn_rag.prompts.chat_template import Message, chat_spans, has_chat_template
from blockattn_rag.prompts.formats import Passage
from blockattn_rag.training.distillation.samples import Question

Nearest = Callable[[str, int], Sequence[Passage]]
"""The passages nearest to a text, best first; at most as many as the number says."""

_ASK = (
    "Here is a text.\n---------------------\n",
    "\n---------------------\nWrite one short question that this text answers. Name what it asks "
    "about, because the reader of the question does not see the text. Write the question alone, "
    "in one line.\nQuestion: ",
)
_MAX_NEW_TOKENS = 48
_BATCH = 8
_FEWEST_WORDS = 3
_QUOTES = " \t\"'*"


@dataclass(frozen=True, slots=True)
class Collection:
    """Passages to write questions about, and how to find those near to a question."""

    passages: Sequence[Passage]
    nearest: Nearest


@dataclass(frozen=True, slots=True)
class Written:
    """Questions of the model's own; ``tried``: passages that it was shown."""

    questions: list[Question]
    tried: int


def write_questions(
    engine: BlockAttentionEngine,
    collection: Collection,
    count: int,
    num_passages: int,
    path: Path,
    seed: int | str,
    on_progress: Callable[[int, int], None],
) -> Written:
    """Up to ``count`` distinct questions, each about one passage, by greedy decoding in full mode.

    Args:
        num_passages: passages of each question: the one that it was written from, and the nearest
            others.
        path: JSON lines with what was written; what is there is not written again.
        seed: of the order in which passages are taken.

    Raises:
        DataError: there is no passage, or no question came of any of them.
    """
    passages = list(dict.fromkeys(collection.passages))
    if not passages:
        raise DataError("found no passage to write questions about, expected some")
    random.Random(seed).shuffle(passages)
    written = _kept(path)
    questions: dict[str, Question] = {}
    tried = 0
    while tried < len(passages) and len(questions) < count:
        batch = passages[tried : tried + min(_BATCH, count - len(questions))]
        tried += len(batch)
        _write_missing(engine, batch, written, path)
        for passage in batch:
            text = written[_name(passage)]
            if text and text.lower() not in questions:
                near = collection.nearest(text, num_passages)
                others = [one for one in near if one != passage][: num_passages - 1]
                questions[text.lower()] = Question(text, (passage, *others))
        on_progress(len(questions), count)
    if not questions:
        raise DataError(
            f"the model wrote no question about any of {tried} passages; give questions "
            "(--questions FILE)"
        )
    return Written(list(questions.values()), tried)


def clean_question(text: str) -> str | None:
    """The first line of what the model wrote, up to its question mark; None if there is none, or
    hardly a word before it."""
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
    spans: tuple[Span, ...] = (
        Span(_ASK[0], "system"),
        Span(text, "conversation"),
        Span(_ASK[1], "system"),
    )
    if has_chat_template(tokenizer):
        messages: list[Message] = [{"role": "user", "content": spans}]
        spans = chat_spans(tokenizer, messages)
    return BlockPrompt((), "".join(span.text for span in spans), tuple(spans))


def _name(passage: Passage) -> str:
    told = json.dumps([passage.title, passage.text]).encode()
    return hashlib.sha256(told).hexdigest()


def _kept(path: Path) -> dict[str, str | None]:
    """What was written before, by passage. A last line that was cut off is cut out."""
    if not path.is_file():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    return {line["passage"]: line["question"] for line in _lines(whole, path)}


def _lines(data: bytes, path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(data.splitlines(), 1):
        try:
            found = json.loads(line)
            yield {"passage": str(found["passage"]), "question": found["question"]}
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}, line {number}: damaged ({error!r}); start again (overwrite=True, "
                "--overwrite)"
            ) from error
