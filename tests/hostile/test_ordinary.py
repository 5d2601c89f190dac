"""Ordinary conversations are rendered exactly as by the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from llama_index.core.base.llms.types import ChatMessage, MessageRole

from tests.hostile.families import Family, families
from tests.hostile.langchain_parts import recording_chat
from tests.hostile.llama_index_parts import recording_llm

FAMILIES = sorted(families())
THINKING = "<think>\nThe tower is tall.\n</think>\n\nIt is 40 m tall."
CONVERSATIONS: dict[str, list[tuple[str, str]]] = {
    "a question": [("user", "What is the height of the tower?")],
    "with blanks around": [("user", "  What is it? \n\n")],
    "in JSON": [("user", '{"a": ["b\\n", "c"]}')],
    "a system message": [("system", " Be brief. "), ("user", "What is it?")],
    "a history": [("user", "Who?"), ("assistant", " The user. "), ("user", "Why?")],
    "thinking in a history": [("user", "How tall?"), ("assistant", THINKING), ("user", "Why?")],
    "an answer that is equal": [("user", "a"), ("assistant", "a"), ("user", "a")],
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return families()[request.param]


def by_template(family: Family, messages: Sequence[Any]) -> str:
    return str(
        family.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
    )


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_equals_the_rendered_template(family: Family, name: str) -> None:
    turns = CONVERSATIONS[name]
    messages = [{"role": role, "content": text} for role, text in turns]
    if family.name == "gemma" and turns[0][0] == "system":  # no system role
        messages = [{"role": "user", "content": f"{turns[0][1]}\n\n{turns[1][1]}"}]
    expected = by_template(family, messages)
    llm, chat = recording_llm(family), recording_chat(family)
    told = [ChatMessage(role=MessageRole(role), content=text) for role, text in turns]
    kinds = {"system": SystemMessage, "user": HumanMessage, "assistant": AIMessage}
    said: list[BaseMessage] = [kinds[role](text) for role, text in turns]
    for tokenizer, prompt in (
        (llm.source.tokenizer, llm.to_prompt(told)),
        (chat.source.tokenizer, chat.to_prompt(said)),
    ):
        assert prompt.text == expected
        if "think" not in name and not family.swallows_blanks:
            assert tokenizer.prompt_ids(prompt).flat == family.parsed(expected)
