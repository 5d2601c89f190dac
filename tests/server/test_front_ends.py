"""Requests of chat front ends. ``tests/front_ends.json`` has two turns for each front end.

The second turn repeats the first passage of the first turn in another place, with another number.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from blockattn_rag.prompts.blocks import STORED
from blockattn_rag.prompts.recognition import marked_sources
from blockattn_rag.server.vllm.bodies import ChatBody
from blockattn_rag.server.vllm.openai import Prompts
from tests.models import tiny_tokenizer

FRONT_ENDS = json.loads((Path(__file__).parents[1] / "front_ends.json").read_text())
PROMPTS = Prompts(tiny_tokenizer())


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_a_repeated_source_has_the_same_tokens_in_another_place(name: str) -> None:
    turns = []
    for messages in FRONT_ENDS[name]:
        prompt = PROMPTS.chat(ChatBody.from_dict({"messages": messages}), [], {}, marked_sources)
        tokens = PROMPTS.token_ids(prompt, "block")
        ids = iter(tokens.token_ids)
        blocks = [[*islice(ids, length)] for length in tokens.lengths]
        turns.append([ids for ids, keep in zip(blocks, tokens.keep, strict=True) if keep == STORED])
    (first, _), (_, second) = turns
    assert first == second
    assert "The height of Halden Tower is 214 metres." in PROMPTS.tokenizer.decode(first)
