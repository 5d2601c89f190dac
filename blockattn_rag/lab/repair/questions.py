"""Questions that the model itself writes about passages."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.errors import DataError
from blockattn_rag.lab.repair.data import Nearest, Question
from blockattn_rag.prompts.blocks import BlockPrompt, Span
from blockattn_rag.prompts.chat_template import Message, chat_spans, has_chat_template
from blockattn_rag.prompts.formats import Passage

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


def write_questions(
    engine: BlockAttentionEngine,
    passages: Sequence[Passage],
    nearest: Nearest,
    count: int,
    num_passages: int,
    path: Path,
    seed: int,
    on_progress: Callable[[int, int], None],
    time_is_up: Callable[[], bool] = lambda: False,
) -> list[Question]:
    """Write up to ``count`` distinct questions, each about one passage, with greedy decoding.

    Args:
        passages: Passages to write questions about.
        nearest: Function that finds the other passages of a question.
        num_passages: Number of passages of each question: the passage that it was written from, and
            the nearest others.
        path: JSON-lines file of the questions so far, which are not written again.
        seed: Random seed for the order of passages.
        on_progress: Called with the number of written questions and ``count``.
        time_is_up: Function that returns whether to stop writing.

    Raises:
        DataError: There is no passage, or the model wrote no question about any passage.
    """
    passages = list(dict.fromkeys(passages))
    if not passages:
        raise DataError("found no passage to write questions about, expected at least one")
    random.Random(seed).shuffle(passages)
    written = _kept(path)
    questions: dict[str, Question] = {}
    tried = 0
    on_progress(0, count)
    while tried < len(passages) and len(questions) < count:
        batch = passages[tried : tried + min(_BATCH, count - len(questions))]
        if time_is_up() and not all(_name(passage) in written for passage in batch):
            break
        tried += len(batch)
        _write_missing(engine, batch, written, path)
        for passage in batch:
            text = written[_name(passage)]
            if text and text.lower() not in questions:
                near = nearest(text, num_passages)
                others = [one for one in near if one != passage][: num_passages - 1]
                questions[text.lower()] = Question(text, (passage, *others))
        on_progress(len(questions), count)
    if not questions:
        raise DataError(
            f"the model wrote no question about any of {tried} passages; pass questions "
            "(--questions FILE)"
        )
    return list(questions.values())


def clean_question(text: str) -> str | None:
    """The first line of a text up to its question mark. None: the line is not a question."""
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
    text = json.dumps([passage.title, passage.text]).encode()
    return hashlib.sha256(text).hexdigest()


def _kept(path: Path) -> dict[str, str | None]:
    """Read the questions so far, by passage. An incomplete last line is deleted from the file."""
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
