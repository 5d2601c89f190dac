"""Training data: JSON Lines records of three kinds, encoded block by block.

Files have one JSON object per line, and may mix these kinds::

    {"messages": [{"role": "user", "content": …}, …, {"role": "assistant", "content": …}]}
    {"blocks": [TEXT | {"text", "before", "after", "control"}, …], "prompt": …, "response": …}
    {"blocks": […], "turns": [{"prompt": …, "response": …}, …]}
    {"question": …, "passages": [{"title": …, "text": …}, …], "answer": …}
    {"passages": […], "turns": [{"question": …, "answer": …}, …]}

*Messages*: each message is a block (or several, with ``blocks_per_turn``). The last two messages, a
question and the assistant's answer, form the final block. *Blocks* are used literally, without a
chat template. ``before`` and ``after`` are template text around the block. ``control`` is whether
to parse control tokens in ``text``. *Passages* are formatted with a prompt format from
:mod:`blockattn_rag.prompts`. With *turns*, the final block contains everything from the first
question on, and all answers are trained on.

Token ids come from the engine's ``BlockTokenizer``. A response is tokenized separately, because at
inference, generation starts after the text of the final block. The token that ends an answer (end
of turn, or EOS) is also trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError

from blockattn_rag.errors import DataError, SegmentationError
from blockattn_rag.lab.evaluation.datasets import passages_of
from blockattn_rag.lab.json_lines import (
    JsonRecord,
    list_of,
    of_kind,
    parsed_lines,
    quoted_names,
    required_text,
)
from blockattn_rag.prompts import formats
from blockattn_rag.prompts.blocks import Block, BlockPrompt, BlockTemplate, Span
from blockattn_rag.prompts.segmentation import conversation
from blockattn_rag.prompts.tokenization import BlockTokenizer

IGNORED = -100
"""Label of tokens without a training loss."""


class TrainingSample(NamedTuple):
    """Prompt, answer, and further (text, answer) pairs in the final block."""

    prompt: BlockPrompt
    answer: str
    further: tuple[tuple[str | tuple[Span, ...], str], ...] = ()


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """Token ids of a sample.

    Args:
        labels: ``input_ids`` of the tokens to train on, ``-100`` for all others. Not shifted.
        block_lengths: Number of tokens in each block, the final block with its answers last.
    """

    input_ids: list[int]
    labels: list[int]
    block_lengths: list[int]


@dataclass(frozen=True, slots=True)
class DataReport:
    """Counts of samples, of samples with a context, and of tokens."""

    samples: int = 0
    with_context: int = 0
    tokens: int = 0

    @classmethod
    def of(cls, block_lengths: Iterable[Sequence[int]]) -> DataReport:
        samples = list(block_lengths)
        return cls(len(samples), sum(len(b) > 1 for b in samples), sum(map(sum, samples)))


class SampleEncoder:
    """Encoder of training records.

    Args:
        prompt: Prompt format of records with passages, or its name.
        blocks_per_turn: Maximum number of blocks per message (``segmentation.conversation``).
        max_tokens: Maximum number of tokens in a record; more raise ``DataError``.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        prompt: str | formats.PromptFormat = "chat",
        blocks_per_turn: int = 1,
        max_tokens: int | None = None,
    ) -> None:
        self.hf_tokenizer = tokenizer
        self.tokenizer = BlockTokenizer(tokenizer)
        self.format = formats.prompt_format(prompt)
        self.blocks_per_turn = blocks_per_turn
        self.max_tokens = max_tokens
        self._end_text = formats.answer_end(tokenizer)
        self._end = self.tokenizer.final_ids(self._end_text, first=False)

    def encode_record(self, record: object) -> EncodedSample:
        try:
            sample = self.parse(record)
        except SegmentationError as error:
            raise DataError(str(error)) from error
        except TemplateError as error:
            raise DataError(f"The chat template rejects this conversation: {error}") from error
        encoded = self.encode(sample)
        count = len(encoded.input_ids)
        if self.max_tokens is not None and count > self.max_tokens:
            raise DataError(
                f"Found a sample of {count} tokens, expected at most {self.max_tokens}; shorten it"
            )
        return encoded

    def parse(self, record: object) -> TrainingSample:
        fields: JsonRecord = of_kind(record, dict, "a record")
        if "messages" in fields:
            return self._parse_messages(fields)
        if "blocks" in fields:
            return _parse_blocks(fields)
        if "passages" in fields:
            return self._parse_passages(fields)
        raise DataError(
            f"Found keys {quoted_names(fields)}, expected 'messages', or 'blocks', 'prompt' and "
            "'response', or 'question', 'passages' and 'answer'"
        )

    def encode(self, sample: TrainingSample) -> EncodedSample:
        """Encode a sample block by block, as the engine does, with answers in the final block."""
        context, final = self.tokenizer.prompt_ids(sample.prompt)
        labels = [IGNORED] * len(final)
        for text, answer in [("", sample.answer), *sample.further]:
            between = self.tokenizer.final_ids(text, first=False)
            learned = [*self.tokenizer.block_ids(Block(answer), first=False), *self._end]
            final = [*final, *between, *learned]
            labels += [IGNORED] * len(between) + learned
        context_ids = [i for ids in context for i in ids]
        return EncodedSample(
            input_ids=context_ids + final,
            labels=[IGNORED] * len(context_ids) + labels,
            block_lengths=[*(len(ids) for ids in context), len(final)],
        )

    def _parse_messages(self, fields: JsonRecord) -> TrainingSample:
        messages = []
        for message, where in _objects(fields, "messages"):
            if message.get("tool_calls"):
                raise DataError(
                    f"'{where}tool_calls' is not supported; put the call into 'content'"
                )
            messages.append({k: required_text(message, k, where) for k in ("role", "content")})
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise DataError("Missing response: the last of two or more messages must have "
                            "the role 'assistant'")  # fmt: skip
        if messages[-2]["role"] == "assistant":
            raise DataError("The last two messages both have the role 'assistant'; join them, or "
                            "put a user's message between them")  # fmt: skip
        *asked, answer = messages
        prompt = conversation(asked, self.hf_tokenizer, blocks_per_turn=self.blocks_per_turn)
        return TrainingSample(prompt, answer["content"])

    def _parse_passages(self, fields: JsonRecord) -> TrainingSample:
        passages = passages_of(fields, may_be_empty=True)
        (question, answer), *later = _turns(fields, "question", "answer")
        prompt = self.format.prompt(question, passages, self.hf_tokenizer)
        return TrainingSample(prompt, answer, tuple((self._follow_up(q), a) for q, a in later))

    def _follow_up(self, question: str) -> tuple[Span, ...]:
        first, *rest = formats.follow_up(question, self.hf_tokenizer)
        # ``encode`` already adds the end token to the previous answer.
        return (Span(first.text.removeprefix(self._end_text), first.origin), *rest)


def read_training_samples(
    files: Iterable[str | Path], encoder: SampleEncoder
) -> Iterator[EncodedSample]:
    """Stream the samples of plain or gzip JSON Lines files, skipping blank lines."""
    for path in files:
        encoded = parsed_lines(path, lambda line, _: encoder.encode_record(line), may_be_empty=True)
        yield from (sample for _, sample in encoded)


def _parse_blocks(fields: JsonRecord) -> TrainingSample:
    items = list_of(fields, "blocks", may_be_empty=True)
    blocks = tuple(_block(item, f"blocks[{i}]") for i, item in enumerate(items))
    (prompt, answer), *later = _turns(fields, "prompt", "response")
    return TrainingSample(BlockPrompt(blocks, prompt), answer, tuple(later))


def _block(item: object, where: str) -> Block:
    fields: JsonRecord = {"text": item} if isinstance(item, str) else of_kind(item, dict, where)
    if unknown := fields.keys() - {"text", "before", "after", "control"}:
        raise DataError(f"Found {where} with keys {quoted_names(unknown)}, expected 'text', and "
                        "optionally 'before', 'after', 'control'")  # fmt: skip
    before, after = (fields.get(key, "") for key in ("before", "after"))
    control = fields.get("control", False)
    if not (isinstance(before, str) and isinstance(after, str) and isinstance(control, bool)):
        raise DataError(
            f"Expected strings for 'before' and 'after' of {where}, and true or false for 'control'"
        )
    text = required_text(fields, "text", f"{where}.")
    span = Span(text, "prompt" if control else "passage")
    return Block(text, BlockTemplate(before, after), (span,))


def _turns(fields: JsonRecord, asked: str, answered: str) -> list[tuple[str, str]]:
    """Return the questions and answers in a record's ``turns``, or in the record itself."""
    turns = _objects(fields, "turns") if "turns" in fields else [(fields, "")]
    return [
        (required_text(turn, asked, where), required_text(turn, answered, where))
        for turn, where in turns
    ]


def _objects(fields: JsonRecord, key: str) -> Iterator[tuple[JsonRecord, str]]:
    """Yield the objects of a list, each with its path for error messages, such as ``turns[0].``."""
    for i, item in enumerate(list_of(fields, key)):
        yield of_kind(item, dict, f"{key}[{i}]"), f"{key}[{i}]."
