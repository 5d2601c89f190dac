"""Blocks, and prompts made of blocks.

A prompt consists of context blocks and a final block. Each context block only attends to itself.
The final block attends to everything (Block-Attention, section 2.1). This module only handles text.

Each piece of text has an *origin*, which determines whether control tokens such as ``<|im_start|>``
are parsed in it, and whether its KV may be stored (docs/security.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Origin = Literal["template", "prompt", "system", "conversation", "answer", "passage", "altered"]
"""Where a text comes from.

``template``: the chat template. ``prompt``: the trusted caller of the engine. ``system``: a system
message. ``conversation``: a question or a tool result. ``answer``: an earlier answer of the model,
with its thoughts and tool calls. ``passage``: a passage with its original text. ``altered``: a
passage that was changed after it was marked.

Control tokens are only parsed in ``template`` and ``prompt``.
"""

PASSAGES: frozenset[Origin] = frozenset({"passage", "altered"})


class Keep(NamedTuple):
    """Where a block's KV may be kept. Determined by the block's origin (``keep_of``).

    Args:
        is_private: Whether the KV is reused only between private blocks, so that response times for
            private text do not reveal which passages are stored.
        is_stored: Whether the KV is written to the store. If not, it is only kept in memory.
    """

    is_private: bool
    is_stored: bool


STORED = Keep(is_private=False, is_stored=True)
IN_MEMORY = Keep(is_private=False, is_stored=False)
PRIVATE = Keep(is_private=True, is_stored=False)


def keep_of(origin: Origin) -> Keep:
    """Determine where the KV of a block with this origin may be kept.

    A system message is stored on its second use. Until then, it is only kept in memory, because
    many system messages contain a date or a name, and are never used again.
    """
    return Keep(origin not in ("passage", "system"), origin == "passage")


def handle_of(text: str) -> str:
    """Content address of a block's text: the first 32 hex digits of its SHA-256."""
    # Untrusted strings may contain lone surrogates.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class Span(NamedTuple):
    """A piece of text with a single origin."""

    text: str
    origin: Origin

    @property
    def parses_control(self) -> bool:
        """Whether control tokens are parsed in this text."""
        return self.origin in ("template", "prompt")


def merged(spans: Iterable[Span], only: Origin | None = None) -> tuple[Span, ...]:
    """Drop empty spans, and join adjacent spans of the same origin, except passages.

    ``only``: Origin of the spans to join. Default: all origins.
    """
    groups: list[tuple[Origin, list[str]]] = []  # Join texts at the end, in linear time.
    for span in spans:
        joins = span.origin not in PASSAGES and only in (None, span.origin)
        if joins and groups and groups[-1][0] == span.origin:
            groups[-1][1].append(span.text)
        elif span.text:
            groups.append((span.origin, [span.text]))
    return tuple(Span("".join(texts), origin) for origin, texts in groups)


def text_of(spans: Iterable[Span]) -> str:
    return "".join(span.text for span in spans)


@dataclass(frozen=True, slots=True)
class BlockTemplate:
    """Text that a prompt format adds before and after a passage, including the separator.

    The text is part of the passage's block. Control tokens such as ``<|doc_start|>`` are parsed in
    it, but never in the passage.
    """

    before: str = ""
    after: str = ""


NO_TEMPLATE = BlockTemplate()


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of text whose tokens only attend to each other.

    Args:
        text: Text without the template. Its digest is the handle.
        template: Text before and after ``text`` when the block is encoded.
        spans: ``text``, split into spans of different origins. Default: one passage.
    """

    text: str
    template: BlockTemplate = NO_TEMPLATE
    spans: tuple[Span, ...] = ()
    handle: str = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"A block's text must be a str, found {type(self.text).__name__}")
        if not self.rendered:
            raise ValueError("A block's text is empty: remove empty passages from the prompt")
        spans = merged(self.spans or [Span(self.text, "passage")])
        if text_of(spans) != self.text:
            raise ValueError("A block's spans must concatenate to its text")
        object.__setattr__(self, "spans", spans)
        object.__setattr__(self, "handle", handle_of(self.text))

    @classmethod
    def of(cls, spans: Iterable[Span], template: BlockTemplate = NO_TEMPLATE) -> Block:
        spans = merged(spans)
        return cls(text_of(spans), template, spans)

    @property
    def origin(self) -> Origin:
        """The most private origin among the spans, which determines where the KV may be kept.

        Chat template text counts as a system message.
        """
        origins = {span.origin for span in self.spans}
        privacy: tuple[Origin, ...] = ("conversation", "answer", "prompt", "altered", "passage")
        return next((origin for origin in privacy if origin in origins), "system")

    @property
    def is_passage(self) -> bool:
        """Whether the block is an intact or altered passage."""
        return self.origin in PASSAGES

    @property
    def rendered(self) -> str:
        """The text with its template, as it is tokenized."""
        return self.template.before + self.text + self.template.after

    @property
    def rendered_spans(self) -> tuple[Span, ...]:
        before, after = self.template.before, self.template.after
        return (Span(before, "template"), *self.spans, Span(after, "template"))


@dataclass(frozen=True, slots=True)
class BlockPrompt:
    """A request's prompt: context blocks and the final block.

    Args:
        context: Blocks before the final block.
        final: Text after the last context block: instructions, history, the question, and the
            start of the answer.
        final_spans: Spans of ``final``. Default: one ``prompt`` span, in which control tokens are
            parsed. Pass untrusted text as spans.
    """

    context: tuple[Block, ...]
    final: str
    final_spans: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "context", tuple(self.context))
        for block in self.context:
            if not isinstance(block, Block):
                raise TypeError(f"Expected Block objects in context, found {type(block).__name__}")
        if not isinstance(self.final, str):
            raise TypeError(
                "Expected final, the last item of a prompt, to be a str, found "
                f"{type(self.final).__name__}"
            )
        if not self.context and not self.final:
            raise ValueError("The prompt is empty: pass a final text, such as a question")
        spans = merged(self.final_spans or [Span(self.final, "prompt")])
        if text_of(spans) != self.final:
            raise ValueError("Expected final_spans that concatenate to the final text")
        object.__setattr__(self, "final_spans", spans)

    @classmethod
    def from_texts(cls, texts: Sequence[str | Block]) -> BlockPrompt:
        """Create a prompt from a list whose last item is the text of the final block.

        Other items are blocks, or passages as strings. Empty strings are dropped. Control tokens
        are parsed in the final block, but not in passages.
        """
        is_list = isinstance(texts, Iterable) and not isinstance(texts, (str, bytes, Mapping))
        if not is_list or not texts:
            raise ValueError(
                "Expected a non-empty list of texts whose last item is the final block, "
                f"found {texts!r:.60}"
            )
        *context, final = texts
        blocks = (
            text if isinstance(text, Block) else Block(text) for text in context if text != ""
        )
        return cls(tuple(blocks), final)  # type: ignore[arg-type]  # checked by __post_init__

    @classmethod
    def from_spans(
        cls, spans: Iterable[Span], template: BlockTemplate = NO_TEMPLATE
    ) -> BlockPrompt:
        """Create a prompt from spans. Each passage becomes a block with ``template``.

        Text before the first passage becomes the first block, and text after the last passage the
        final block. Text between two passages becomes a separate block, or is dropped if it is only
        white space, because the template has its own separator.
        """
        context: list[Block] = []
        between: list[Span] = []
        for span in merged(spans):
            if span.origin not in PASSAGES:
                between.append(span)
                continue
            if between and (not context or text_of(between).strip()):
                context.append(Block.of(between))
            between = []
            if text := span.text.strip():
                context.append(Block.of([Span(text, span.origin)], template))
        return cls(tuple(context), text_of(between), tuple(between))

    @property
    def text(self) -> str:
        """The prompt as one string, without markers."""
        return "".join(block.rendered for block in self.context) + self.final
