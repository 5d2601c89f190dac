"""Sinks: prefix tokens that passages are encoded with, and whose KV is discarded.

Models pay much attention to the first tokens of a prompt, regardless of their meaning. If a passage
is encoded without a prefix, its first tokens become an attention sink, so a prompt with many
passages has many sinks. If it is encoded after a *head*, the text at the start of a prompt, the
head is the only sink, as in full attention (the shared prefix of APE, arXiv 2502.05431). This adds
no cost per answer. The first 4 tokens of a head work as well as the complete head, unless tokens
are recomputed. The head always has the system message of the ``chat`` format, so blocks are reused
in prompts with any system message. docs/guides/stock_models.md lists all sinks.
"""

from __future__ import annotations

import re

from blockattn_rag.prompts.blocks import Span
from blockattn_rag.prompts.chat_template import Message, chat_spans, has_chat_template
from blockattn_rag.prompts.formats import CHAT
from blockattn_rag.prompts.tokenization import BlockTokenizer

NO_SINK, HEAD = "none", "head"
_DATE = "01 Jan 2026"
_HEAD = re.compile(r"head:([1-9][0-9]{0,3})")


def check_sink(sink: str) -> str:
    """Return a valid sink unchanged. Raises ``ValueError`` for other values."""
    if isinstance(sink, str) and is_sink(sink):
        return sink
    raise ValueError(
        f"Unknown sink {sink!r}: expected 'none', 'bos', 'head', or 'head:N' with N tokens, such "
        "as 'head:4'."
    )


def is_sink(name: str) -> bool:
    return name in (NO_SINK, "bos", HEAD) or _HEAD.fullmatch(name) is not None


def sink_ids(sink: str, tokenizer: BlockTokenizer) -> list[int]:
    """Token ids of a sink. Raises ``ValueError`` if it is unknown or does not fit the model."""
    if check_sink(sink) == NO_SINK:
        return []
    if sink == "bos":
        bos = tokenizer.tokenizer.bos_token_id
        if bos is None:
            raise ValueError("This model has no BOS token: use sink='head:1'.")
        return [bos]
    if sink == HEAD:
        return _whole_head_ids(tokenizer)
    count = int(sink.partition(":")[2])
    head = _head_ids(tokenizer)
    if count > len(head):
        raise ValueError(
            f"Found sink={sink!r}, but the head of a prompt has {len(head)} tokens for this model: "
            f"use 'head:{len(head)}' or less."
        )
    return head[:count]


def _whole_head_ids(tokenizer: BlockTokenizer) -> list[int]:
    """Token ids of the complete head, up to the first passage, independent of today's date. A head
    with a new date would turn all stored blocks into misses."""
    template = str(tokenizer.tokenizer.chat_template)
    writes_today = "strftime_now" in template and "date_string" not in template
    if not has_chat_template(tokenizer.tokenizer) or writes_today:
        return tokenizer.final_ids(f"{CHAT.system}\n\n{CHAT.before}", first=True)
    question = Span("?", "conversation")
    turns: list[Message] = [
        {"role": "system", "content": (Span(CHAT.system, "system"),)},
        {"role": "user", "content": (Span(CHAT.before, "system"), question)},
    ]
    spans = chat_spans(tokenizer.tokenizer, turns, date_string=_DATE)
    return tokenizer.final_ids(spans[: spans.index(question)], first=True)


def _head_ids(tokenizer: BlockTokenizer) -> list[int]:
    """Token ids of the head of a prompt, from which ``head:N`` takes the first N tokens."""
    if not has_chat_template(tokenizer.tokenizer):
        return tokenizer.final_ids(CHAT.system, first=True)
    turns: list[Message] = [
        {"role": "system", "content": CHAT.system},
        {"role": "user", "content": CHAT.before},
    ]
    return tokenizer.final_ids(chat_spans(tokenizer.tokenizer, turns), first=True)
