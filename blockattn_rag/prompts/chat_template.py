"""From chat messages to the text that a model is given, by the model's own chat template.

A chat template is a program: it trims contents, escapes them, leaves some out. Afterwards nobody
can tell what the template wrote from what stood in a message, and a question that quotes
``<|im_end|>`` would end its turn. So every template runs twice: once on the contents, which gives
the text, and once on slots in their place, which tells what the template wrote. A content is then
looked for between the two pieces of template around its slot, trimmed or escaped as templates do.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from jinja2 import TemplateError

from blockattn_rag.errors import SegmentationError
from blockattn_rag.prompts.blocks import PASSAGES, Origin, Span, merged, text_of
from blockattn_rag.prompts.marked_text import content_spans

logger = logging.getLogger("blockattn_rag")

Message: TypeAlias = Mapping[str, Any]
Render: TypeAlias = Callable[[list[dict[str, Any]]], str]
Spans: TypeAlias = tuple[Span, ...]

# Templates compare and count these fields (roles, names of tools, ids), and so must see them as
# they are. A value of harmless characters is left in place; other characters of ids are replaced.
_COMPARED_FIELDS = ("role", "type", "name", "id", "tool_call_id")
_ID_FIELDS = ("id", "tool_call_id")
_HARMLESS = re.compile(r"[\w.:/ -]{0,128}")
_HARMFUL_CHARACTER = re.compile(r"[^\w.:/ -]")


def has_chat_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def render_chat(
    tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool = True
) -> str:
    """Messages as one string; see ``chat_spans``."""
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
    """The prompt that messages become in the chat template of ``tokenizer``, by who wrote what.

    Neighbouring messages of one role are merged, since many templates insist on alternation, and
    a system message goes into the first user message where the template knows no system role.

    Args:
        messages: with ``role`` and ``content``, and what else the template knows. A content is a
            string, in which passages stand between markers, or spans.
        tools: definitions of tools. In a definition that spells a control token, it is text.
        tools_variable: the template's variable that takes them.
        add_generation_prompt: whether the text ends where the answer starts.
        template_kwargs: further variables of the template, such as ``enable_thinking``.

    Raises:
        ValueError: no message, or a role that is no plain word.
        SegmentationError: the template changes contents beyond recognition.
        jinja2.TemplateError: the template refuses the messages.
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
        # The template refuses the messages, or drops passages: only a system role is mended.
        if not has_system:
            raise
    else:
        # Some templates drop a system message without a word.
        if not has_system or 0 in shown or not text_of(turns[0]["content"]).strip():
            return spans
    system, first, *rest = turns
    joined = (*system["content"], Span("\n\n", "system"), *first["content"])
    return _trace(render, [{**first, "content": joined}, *rest], defined, control)[0]


def trace(render: Render, messages: Sequence[Message]) -> Spans:
    """What ``render`` makes of messages, by who wrote what; see the head of this file.

    Args:
        render: gives the prompt of messages whose contents are strings.
    """
    return _trace(render, [_with_spans(message) for message in messages])[0]


def _trace(
    render: Callable[..., str],
    turns: Sequence[Message],
    variables: Mapping[str, Any] | None = None,
    control_tokens: Sequence[str] = (),
) -> tuple[Spans, set[int]]:
    """A prompt, and the numbers of the slots that the template shows; the first content's is 0.

    ``variables``: of the template, in which only what spells a control token is a content.
    """
    slots, given = _Slots(), variables or {}
    slotted = [slots.put_in(turn) for turn in turns]
    skeleton = render(slotted, **slots.instead_of(given, control_tokens))
    text = render([{**turn, "content": text_of(turn["content"])} for turn in turns], **given)
    pieces = slots.pattern.split(skeleton)  # template, slot, template, slot, ..., template
    template, numbers = pieces[::2], [int(number) for number in pieces[1::2]]
    asked, shown = [slots.spans[number] for number in numbers], set(numbers)
    _check_passages_are_shown(turns, slots, shown)
    contents = _find(asked, text, template)
    if contents is None:
        # This template does more to a content than is known here. The contents then stand in their
        # slots as they are: nothing of them may ever pass for the template's.
        if not set(slots.of_turn.values()) <= shown:
            raise SegmentationError(
                "the chat template changes contents so that they cannot be found in its output, or "
                "leaves some out; use a template that shows every message's content as it is"
            )
        logger.debug("contents are not where the chat template has its slots; put in as they are")
        contents = [
            _escaped(spans) if before.endswith('"') else spans
            for before, spans in zip(template, asked, strict=False)
        ]
    prompt = [Span(template[0], "template")]
    for spans, after in zip(contents, template[1:], strict=True):
        prompt += [*spans, Span(after, "template")]
    return merged(prompt), shown


def _check_passages_are_shown(turns: Sequence[Message], slots: _Slots, shown: set[int]) -> None:
    """Refuse a template that leaves out a message with passages: nobody would notice."""
    for turn in turns:
        number = slots.of_turn.get(id(turn))
        if number not in shown and any(span.origin in PASSAGES for span in turn["content"]):
            raise SegmentationError(
                f"the chat template shows no message of the role {turn['role']!r}, and so none of "
                "its passages; use a template that does, or put the passages into a message of "
                "the user"
            )


def _with_spans(message: Message) -> dict[str, Any]:
    """A message whose content is spans, its markers read."""
    role, content = message["role"], message.get("content")
    if not isinstance(role, str) or not _HARMLESS.fullmatch(role):
        raise ValueError(f"found the role {role!r:.60}; a role is a plain word, such as 'user'")
    if not isinstance(content, tuple):
        content = content_spans(str(content or ""), origin_of(role))
    return {**_plain_ids(message), "content": merged(content)}


def _plain_ids(message: Any) -> Any:
    """A message whose ids of tool calls are plain words of the same length, 128 characters at most,
    because templates count their characters and ask for nothing else."""
    if isinstance(message, (list, tuple)) and not isinstance(message, Span):
        return type(message)(_plain_ids(item) for item in message)
    if not isinstance(message, Mapping):
        return message
    plain = dict(message)
    for key, value in message.items():
        if key in _ID_FIELDS and isinstance(value, str):
            plain[key] = _HARMFUL_CHARACTER.sub("_", value)[:128]
        elif key != "arguments":  # arguments have keys of their own
            plain[key] = _plain_ids(value)
    return plain


def _with_reasoning(turn: dict[str, Any]) -> dict[str, Any]:
    """An answer and its thoughts apart, for templates that write what stands around thoughts."""
    text = text_of(turn["content"])
    if turn["role"] != "assistant" or "</think>" not in text or "reasoning_content" in turn:
        return turn
    thoughts = text.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
    answer = text.split("</think>")[-1].lstrip("\n")
    contents = _cut(turn["content"], len(text) - len(answer), len(text))
    return {**turn, "content": contents, "reasoning_content": thoughts}


def origin_of(role: str) -> Origin:
    """Who wrote the messages of a role."""
    return "system" if role in ("system", "developer") else "conversation"


def _merge_same_role(messages: Sequence[Message]) -> list[dict[str, Any]]:
    if not messages:
        raise ValueError("expected at least one chat message, found none")
    turns: list[dict[str, Any]] = []
    for message in map(_with_spans, messages):
        last = turns[-1] if turns else {}
        # Messages that carry more than their text stay apart: tool calls must not be lost.
        if last.get("role") == message["role"] and {*last, *message} == {"role", "content"}:
            between = Span("\n\n", origin_of(message["role"]))
            last["content"] = merged([*last["content"], between, *message["content"]])
        else:
            turns.append(message)
    return turns


class _Slots:
    """Slots in place of contents, and what belongs in each. Nobody can guess how one is spelled."""

    def __init__(self) -> None:
        self._name = f"Kv{secrets.token_hex(8)}"
        self.pattern = re.compile(rf"{self._name}x(\d+)x")
        self.spans: list[Spans] = []
        self.of_turn: dict[int, int] = {}  # the content's slot, by the message's identity

    def put_in(self, turn: Message) -> dict[str, Any]:
        """A message with slots in place of its content and of all that others may have written."""
        if text_of(turn["content"]).strip():
            self.of_turn[id(turn)] = len(self.spans)
        content = self._slot(turn["content"])
        rest = {name: self._replaced(v, name) for name, v in turn.items() if name != "content"}
        return rest | {"content": content}

    def instead_of(self, value: Any, tokens: Sequence[str]) -> Any:
        """A value with slots in place of the strings in it that hold one of the tokens."""
        if isinstance(value, Mapping):
            pairs = value.items()
            return {self.instead_of(k, tokens): self.instead_of(v, tokens) for k, v in pairs}
        if isinstance(value, (list, tuple)):
            return [self.instead_of(item, tokens) for item in value]
        if isinstance(value, str) and any(token in value for token in tokens):
            return self._slot((Span(value, "system"),))
        return value

    def _replaced(self, value: Any, name: str = "") -> Any:
        if isinstance(value, Mapping):
            pairs = value.items()
            return {self._replaced(key, "name"): self._replaced(v, key) for key, v in pairs}
        if isinstance(value, (list, tuple)):
            return [self._replaced(item, name) for item in value]
        if not isinstance(value, str) or (name in _COMPARED_FIELDS and _HARMLESS.fullmatch(value)):
            return value
        # Passages have no place in a call; what marks them is not for the model to see.
        text = text_of(tuple(content_spans(value, "conversation")))
        return self._slot((Span(text, "conversation"),))

    def _slot(self, spans: Spans) -> str:
        if not (text := text_of(spans)).strip():
            return text  # templates ask whether there is a content
        self.spans.append(spans)
        return f"{self._name}x{len(self.spans) - 1}x"


def _find(contents: Sequence[Spans], text: str, template: Sequence[str]) -> list[Spans] | None:
    """The contents as ``text`` has them between the pieces of template; None if it has not."""
    if not text.startswith(template[0]):
        return None
    found, at = [], len(template[0])
    for spans, after in zip(contents, template[1:], strict=True):
        for shown in _as_templates_show(spans):
            if text.startswith(expected := text_of(shown) + after, at):
                found.append(shown)
                at += len(expected)
                break
        else:
            return None
    return found if at == len(text) else None


def _as_templates_show(spans: Spans) -> Iterator[Spans]:
    """A content as templates are known to show it: whole, trimmed, less its thinking; escaped."""
    text, end = text_of(spans), "</think>"
    starts = [0, text.rfind(end) + len(end)] if end in text else [0]
    parts = [part for start in starts for part in _trimmed(text, start)]
    yield from (_cut(spans, *part) for part in parts)
    for ensure_ascii in (False, True):
        yield from (_escaped(_cut(spans, *part), ensure_ascii=ensure_ascii) for part in parts)


def _trimmed(text: str, start: int) -> Iterator[tuple[int, int]]:
    """Where ``text[start:]`` begins and ends: whole, and without blanks at both ends or at one."""
    end, right = len(text), len(text.rstrip())
    left, line = (end - len(text[start:].lstrip(blanks)) for blanks in (None, "\n"))
    yield from ((start, end), (left, right), (left, end), (start, right), (line, end))


def _cut(spans: Spans, start: int, stop: int) -> Spans:
    """``[start:stop]`` of the spans' text."""
    kept, at = [], 0
    for span in spans:
        part = span.text[max(0, start - at) : max(0, stop - at)]
        kept.append(_changed(span, part))
        at += len(span.text)
    return merged(kept)


def _escaped(spans: Spans, *, ensure_ascii: bool = False) -> Spans:
    """Spans as the inside of a JSON string."""
    dump = partial(json.dumps, ensure_ascii=ensure_ascii)
    return merged(_changed(span, dump(span.text)[1:-1]) for span in spans)


def _changed(span: Span, text: str) -> Span:
    altered = span.origin == "passage" and text != span.text
    return Span(text, "altered" if altered else span.origin)
