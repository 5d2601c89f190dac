"""Renders chat messages with a model's chat template, and tracks the origin of each piece of text.

A chat template is a program that may trim, escape or drop contents. Its output does not show
whether ``<|im_end|>`` came from the template or from a message, but a question that quotes a
control token must not end its turn. Every template is therefore rendered twice: with the contents,
to produce the text, and with a placeholder (slot) for each content, to reveal the template's own
text. The contents are then located between the pieces of the template's text, where they may appear
unchanged, trimmed, escaped or without thoughts.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, TypeAlias

from jinja2 import Environment, TemplateError
from jinja2.meta import find_undeclared_variables

from blockattn_rag.errors import SegmentationError
from blockattn_rag.prompts.blocks import PASSAGES, Origin, Span, merged, text_of
from blockattn_rag.prompts.markers import content_spans

logger = logging.getLogger("blockattn_rag")

Message: TypeAlias = Mapping[str, Any]
Render: TypeAlias = Callable[..., str]
Spans: TypeAlias = tuple[Span, ...]

# Templates compare the values of these fields, or check their lengths, so values with only harmless
# characters are not replaced by slots. In ids, any other character becomes an underscore.
_COMPARED_FIELDS = ("role", "type", "name", "id", "tool_call_id")
_ID_FIELDS = ("id", "tool_call_id")
_HARMLESS = re.compile(r"[\w.:/ -]{0,128}")
_HARMFUL_CHARACTER = re.compile(r"[^\w.:/ -]")

# Template variables set by this package or transformers.
_RESERVED = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"),
        *("raise_exception", "strftime_now", "tojson", "chat_template", "tokenize", "return_dict"),
    }
)
_GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # Only supported by transformers.


def has_chat_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def render_chat(
    tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool = True
) -> str:
    """Render messages to one string; see ``chat_spans``."""
    return text_of(chat_spans(tokenizer, messages, add_generation_prompt=add_generation_prompt))


def chat_spans(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    tools_variable: str = "tools",
    add_generation_prompt: bool = True,
    **template_kwargs: Any,
) -> Spans:
    """Render messages with the chat template of ``tokenizer``, and return spans by origin.

    Consecutive messages of one role without other fields are merged, because many templates require
    alternating roles. If the template rejects or drops the system message, it moves into the next
    one. Spans of different messages are not joined, even without template text between them.

    Args:
        messages: Messages with ``role``, ``content``, and other fields that the template reads. The
            content is a tuple of spans, or a string with markers around passages.
        tools: Tool definitions, in which control tokens are not parsed.
        tools_variable: Name of the template variable for ``tools``.
        template_kwargs: Other template variables, such as ``enable_thinking``.
    """
    render = partial(
        tokenizer.apply_chat_template,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        **template_kwargs,
    )
    defined: dict[str, Any] = {tools_variable: [*tools]} if tools else {}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    control = [str(token) for token in added.values() if len(str(token)) > 1]
    turns = _merge_same_role(messages)
    if "reasoning_content" in str(tokenizer.chat_template):
        turns = [_with_reasoning(turn) for turn in turns]
    has_system = turns[0]["role"] == "system" and len(turns) > 1
    try:
        spans, shown = _trace(render, turns, defined, control)
    except (TemplateError, SegmentationError):
        # The template rejects the messages or drops passages. Retry without a system role.
        if not has_system:
            raise
    else:
        # Some templates drop a system message silently.
        if not has_system or 0 in shown or not text_of(turns[0]["content"]).strip():
            return spans
    system, first, *rest = turns
    joined = (*system["content"], Span("\n\n", "system"), *first["content"])
    return _trace(render, [{**first, "content": joined}, *rest], defined, control)[0]


def trace(render: Render, messages: Sequence[Message]) -> Spans:
    """Render messages with ``render``, and return spans by origin."""
    return _trace(render, [_with_spans(message) for message in messages], {}, ())[0]


def _trace(
    render: Render,
    turns: Sequence[Message],
    variables: Mapping[str, Any],
    control_tokens: Sequence[str],
) -> tuple[Spans, set[int]]:
    """Return a prompt as spans, and the numbers of the slots that the template renders."""
    slots = _Slots()

    def without_control(value: str, _: str) -> str:
        has_control = any(token in value for token in control_tokens)
        return slots.slot((Span(value, "system"),)) if has_control else value

    slotted = [slots.put_in(turn) for turn in turns]
    skeleton = render(slotted, **_with_strings(variables, without_control))
    text = render([{**turn, "content": text_of(turn["content"])} for turn in turns], **variables)
    # The pieces are template, slot, template, slot, ..., template.
    pieces = slots.pattern.split(skeleton)
    template, numbers = pieces[::2], [int(number) for number in pieces[1::2]]
    asked, shown = [slots.spans[number] for number in numbers], set(numbers)
    for turn in turns:
        is_shown = slots.of_turn.get(id(turn)) in shown
        if not is_shown and any(span.origin in PASSAGES for span in turn["content"]):
            raise SegmentationError(
                f"The chat template does not render messages with the role {turn['role']!r}, which "
                "would drop passages: use another template, or put the passages in a user message"
            )
    contents = _find(asked, text, template)
    if contents is None:
        # The template changes a content in an unknown way. Fill the slots with the original
        # contents, so that no part of a content is attributed to the template.
        if not set(slots.of_turn.values()) <= shown:
            raise SegmentationError(
                "The chat template drops contents, or changes them so that they cannot be found in "
                "its output: use a template that renders every message's content unchanged"
            )
        logger.debug("The chat template changes contents: using the original contents instead")
        contents = [
            _escaped(spans) if before.endswith('"') else spans
            for before, spans in zip(template, asked, strict=False)
        ]
    prompt = [Span(template[0], "template")]
    for spans, after in zip(contents, template[1:], strict=True):
        prompt += [*spans, Span(after, "template")]
    return merged(prompt, only="template"), shown


def _with_spans(message: Message) -> dict[str, Any]:
    role = message["role"]
    if not isinstance(role, str) or not _HARMLESS.fullmatch(role):
        raise ValueError(f"Invalid role {role!r:.60}: expected a plain word, such as 'user'")
    return {**_with_strings(_fields(message), _plain_id), "content": spans_of(message)}


def _fields(message: Message) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "content"}


def spans_of(message: Message) -> Spans:
    content = message.get("content")
    if not isinstance(content, tuple):
        content = content_spans(str(content or ""), origin_of(message["role"]))
    return merged(content)


def _plain_id(value: str, field: str) -> str:
    # Some templates require ids of a fixed length, so characters are replaced, not removed.
    return _HARMFUL_CHARACTER.sub("_", value)[:128] if field in _ID_FIELDS else value


def _with_reasoning(turn: dict[str, Any]) -> dict[str, Any]:
    """Move an answer's thoughts to ``reasoning_content`` for templates that render this field."""
    text = text_of(turn["content"])
    if turn["role"] != "assistant" or "</think>" not in text or "reasoning_content" in turn:
        return turn
    thoughts = text.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
    answer = text.split("</think>")[-1].lstrip("\n")
    contents = _cut(turn["content"], len(text) - len(answer), len(text))
    return {**turn, "content": contents, "reasoning_content": thoughts}


def origin_of(role: str) -> Origin:
    if role == "assistant":
        return "answer"
    return "system" if role in ("system", "developer") else "conversation"


def _merge_same_role(messages: Sequence[Message]) -> list[dict[str, Any]]:
    if not messages:
        raise ValueError("Expected at least one chat message, found none")
    turns: list[dict[str, Any]] = []
    for message in map(_with_spans, messages):
        last = turns[-1] if turns else {}
        # Do not merge messages with other fields, such as tool calls.
        if last.get("role") == message["role"] and {*last, *message} == {"role", "content"}:
            between = Span("\n\n", origin_of(message["role"]))
            last["content"] += [between, *message["content"]]
        else:
            turns.append({**message, "content": [*message["content"]]})
    return [{**turn, "content": tuple(turn["content"])} for turn in turns]


class _Slots:
    """Placeholders for untrusted strings, with random names that no author of text can guess."""

    def __init__(self) -> None:
        self._name = f"Kv{secrets.token_hex(8)}"
        self.pattern = re.compile(rf"{self._name}x(\d+)x")
        self.spans: list[Spans] = []
        self.of_turn: dict[int, int] = {}  # Slot number of each message's content, by id(message).

    def put_in(self, turn: Message) -> dict[str, Any]:
        """Replace a message's content, and all other untrusted strings, with slots."""
        if text_of(turn["content"]).strip():
            self.of_turn[id(turn)] = len(self.spans)
        content = self.slot(turn["content"])
        origin: Origin = "answer" if turn["role"] == "assistant" else "conversation"

        def replaced(value: str, field: str) -> str:
            if field in _COMPARED_FIELDS and _HARMLESS.fullmatch(value):
                return value
            # Tool calls and other fields cannot contain passages, so their markers are removed.
            return self.slot((Span(text_of(content_spans(value, origin)), origin),))

        return {**_with_strings(_fields(turn), replaced), "content": content}

    def slot(self, spans: Spans) -> str:
        if not (text := text_of(spans)).strip():
            return text  # Some templates check for empty contents.
        self.spans.append(spans)
        return f"{self._name}x{len(self.spans) - 1}x"


def _with_strings(value: Any, change: Callable[[str, str], str], field: str = "") -> Any:
    """Replace each string in a nested value with ``change(string, name of its field)``.

    Keys count as the field ``"name"``. The arguments of a tool call have arbitrary keys, so every
    value in them counts as the field ``"arguments"``.
    """
    if isinstance(value, Mapping):
        return {
            _with_strings(key, change, "name"): _with_strings(
                item, change, field if field == "arguments" else key
            )
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_with_strings(item, change, field) for item in value]
    return change(value, field) if isinstance(value, str) else value


def _find(contents: Sequence[Spans], text: str, template: Sequence[str]) -> list[Spans] | None:
    """Return the contents as they appear in ``text`` between the template's pieces, or None."""
    if not text.startswith(template[0]):
        return None
    renderings, at = [], len(template[0])
    for spans, after in zip(contents, template[1:], strict=True):
        for shown in _as_templates_show(spans):
            if text.startswith(expected := text_of(shown) + after, at):
                renderings.append(shown)
                at += len(expected)
                break
        else:
            return None
    return renderings if at == len(text) else None


def _as_templates_show(spans: Spans) -> Iterator[Spans]:
    """Yield a content as templates may render it: unchanged, trimmed, without thoughts, escaped."""
    text, end = text_of(spans), "</think>"
    stop, right = len(text), len(text.rstrip())
    parts = []
    for start in [0, text.rfind(end) + len(end)] if end in text else [0]:
        left, line = (stop - len(text[start:].lstrip(blanks)) for blanks in (None, "\n"))
        # Untrimmed, then trimmed on both sides, on the left, on the right, and of leading newlines.
        parts += [(start, stop), (left, right), (left, stop), (start, right), (line, stop)]
    yield from (_cut(spans, *part) for part in parts)
    for ensure_ascii in (False, True):
        yield from (_escaped(_cut(spans, *part), ensure_ascii=ensure_ascii) for part in parts)


def _cut(spans: Spans, start: int, stop: int) -> Spans:
    """Return the spans of ``text_of(spans)[start:stop]``."""
    kept, at = [], 0
    for span in spans:
        kept.append(_changed(span, span.text[max(0, start - at) : max(0, stop - at)]))
        at += len(span.text)
    return merged(kept, only="template")


def _escaped(spans: Spans, *, ensure_ascii: bool = False) -> Spans:
    """Escape the text of spans as in JSON strings."""
    escaped = (json.dumps(span.text, ensure_ascii=ensure_ascii)[1:-1] for span in spans)
    return merged(map(_changed, spans, escaped), only="template")


def _changed(span: Span, text: str) -> Span:
    altered = span.origin == "passage" and text != span.text
    return Span(text, "altered" if altered else span.origin)


def check_template_kwargs(tokenizer: Any, variables: Mapping[str, Any] | None) -> dict[str, Any]:
    """Validate template variables that an application sets, and return them as a dict.

    Control tokens in values are parsed, so values must come from the application, never from its
    users. Raises ``TypeError`` or ``ValueError`` for invalid, reserved or unknown variables.
    """
    if not variables:
        return {}
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise TypeError(
            "Expected chat_template_kwargs to be a mapping, such as {'enable_thinking': False}, "
            f"found {variables!r:.80}"
        )
    if taken := sorted(_RESERVED & {*variables}):
        raise ValueError(
            f"Found {', '.join(taken)} in chat_template_kwargs, but reserved variables cannot be "
            "set: pass messages, tools and passages as arguments of the call"
        )
    known = template_variables(tokenizer)
    if unknown := sorted({*variables} - known):
        names = ", ".join(sorted(known)) or "none"
        raise ValueError(
            f"Found {', '.join(unknown)} in chat_template_kwargs, but the chat template of this "
            f"model only uses: {names}"
        )
    return dict(variables)


def template_variables(tokenizer: Any) -> frozenset[str]:
    """Variables that a tokenizer's chat template reads, and that an application may set."""
    template = getattr(tokenizer, "chat_template", None) or ""
    sources = template.values() if isinstance(template, Mapping) else [template]
    return frozenset[str]().union(*map(_variables, sources)) - _RESERVED


@lru_cache(maxsize=64)
def _variables(source: str) -> frozenset[str]:
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    return frozenset(find_undeclared_variables(environment.parse(_GENERATION_TAG.sub("", source))))
