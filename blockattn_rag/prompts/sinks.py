"""Sinks: tokens before a context block while it is encoded, whose keys and values it does not keep.

Models direct much attention to the first tokens of a prompt, whatever these say. A passage that is
encoded alone makes such a sink of its own first tokens, and a prompt of many passages has many. A
passage that is encoded after the head of a prompt finds the head's, as in full attention (the
shared prefix of APE, 2502.05431). It does not depend on the question, and costs nothing per answer.

    none    each block alone, as in the Block-Attention paper; for block-fine-tuned models
    bos     after the BOS token
    head:N  after the first N tokens of the chat template's head (4 do as well as more)
"""

from __future__ import annotations

import re

from blockattn_rag.prompts.chat_template import Message, chat_spans, has_chat_template
from blockattn_rag.prompts.formats import CHAT
from blockattn_rag.prompts.tokenization import BlockTokenizer

NO_SINK = "none"
_HEAD = re.compile(r"head:([1-9][0-9]{0,3})")


def check_sink(sink: str) -> str:
    """The sink, unchanged.

    Raises:
        ValueError: it has none of the forms above.
    """
    if isinstance(sink, str) and is_sink(sink):
        return sink
    raise ValueError(
        f"Unknown sink {sink!r}: expected 'none', 'bos' or 'head:N' with N tokens, such as "
        "'head:4'."
    )


def is_sink(name: str) -> bool:
    """Whether a text has the form of a sink."""
    return name in (NO_SINK, "bos") or _HEAD.fullmatch(name) is not None


def sink_ids(sink: str, tokenizer: BlockTokenizer) -> list[int]:
    """Token ids of a sink.

    Raises:
        ValueError: the model has no BOS token, or its head has fewer tokens.
    """
    if check_sink(sink) == NO_SINK:
        return []
    if sink == "bos":
        bos = tokenizer.tokenizer.bos_token_id
        if bos is None:
            raise ValueError("This model has no BOS token: use sink='head:1'.")
        return [bos]
    count = int(sink.partition(":")[2])
    head = _head_ids(tokenizer)
    if count > len(head):
        raise ValueError(f"sink={sink!r}, but the head of a prompt has {len(head)} tokens here")
    return head[:count]


def _head_ids(tokenizer: BlockTokenizer) -> list[int]:
    """How a prompt begins that both frameworks make: with a system message, if there may be one."""
    if not has_chat_template(tokenizer.tokenizer):
        return tokenizer.final_ids(CHAT.system, first=True)
    turns: list[Message] = [
        {"role": "system", "content": CHAT.system},
        {"role": "user", "content": CHAT.before},
    ]
    return tokenizer.final_ids(chat_spans(tokenizer.tokenizer, turns), first=True)
