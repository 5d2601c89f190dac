"""Sinks: tokens before a context block while it is encoded, whose keys and values it does not keep.

Models direct much attention to the first tokens of a prompt, whatever these say. A passage that is
encoded alone makes such a sink of its own first tokens, and a prompt of many passages has many. A
passage that is encoded after the head of a prompt finds the head's, as in full attention (the
shared prefix of APE, 2502.05431). It does not depend on the question, and costs nothing per answer.

    none         each block alone, as in the Block-Attention paper; for block-fine-tuned models
    bos          after the BOS token
    head:N       after the first N tokens of the chat template's head (4 do as well as more)
    first-block  after the whole first block of the prompt, which holds the system message
"""

from __future__ import annotations

import re

from blockattn_rag.prompts.chat_template import Message, chat_spans, has_chat_template
from blockattn_rag.prompts.formats import CHAT
from blockattn_rag.prompts.tokenization import BlockTokenizer

NO_SINK = "none"
FIRST_BLOCK = "first-block"
_HEAD = re.compile(r"head:([1-9][0-9]{0,3})")


def check_sink(sink: str) -> str:
    """The sink as it stands.

    Raises:
        ValueError: it is none of the forms above.
    """
    if sink in (NO_SINK, "bos", FIRST_BLOCK) or (isinstance(sink, str) and _HEAD.fullmatch(sink)):
        return sink
    raise ValueError(
        f"sink must be 'none', 'bos', 'first-block' or 'head:N' with N tokens, such as 'head:4'; "
        f"found {sink!r}"
    )


def sink_ids(sink: str, tokenizer: BlockTokenizer) -> list[int]:
    """Token ids of a sink that is the same for all prompts.

    Raises:
        ValueError: the model has no BOS token, or its head has fewer tokens; or the sink is
            ``"first-block"``, which only a prompt has.
    """
    if check_sink(sink) == NO_SINK:
        return []
    if sink == FIRST_BLOCK:
        raise ValueError(
            "sink='first-block' encodes passages after the first block of their prompt; passages "
            "alone have none: encode them as a prompt (engine.encode(BlockPrompt(...))), or use "
            "sink='head:4'"
        )
    if sink == "bos":
        bos = tokenizer.tokenizer.bos_token_id
        if bos is None:
            raise ValueError("this model has no BOS token; use sink='head:1'")
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
