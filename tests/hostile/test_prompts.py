"""No content can inject control tokens, and every passage is exactly one block. Every family
receives every kind of request, once with hostile contents and once with harmless ones.
``HOSTILE_COUNT=10000`` sets the number of conversations."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from blockattn_rag.prompts.blocks import BlockTemplate
from tests.hostile import langchain_parts, llama_index_parts
from tests.hostile.families import Family, families
from tests.hostile.judge import Asked, Fault, judge
from tests.hostile.texts import Attacker, Sample

COUNT = int(os.environ.get("HOSTILE_COUNT", "0"))
FAMILIES = sorted(families())
Ask = Callable[[Family, Any, Sample], list[Asked]]


@dataclass(frozen=True)
class Trial:
    """One kind of request to a family. ``model``: A recording model of either framework."""

    name: str
    family: Family
    model: Any
    ask: Ask

    def faults(self, seed: str) -> list[Fault]:
        """Send a hostile sample and its harmless version. Returns the faults."""
        sample = Attacker(seed, self.family.controls).sample()
        neutral = self.ask(self.family, self.model, sample.neutral())
        try:
            hostile = self.ask(self.family, self.model, sample)
        except Exception as error:  # noqa: BLE001 -- a conversation that cannot be asked is a fault
            return [Fault("raised", repr(error))]
        tokenizer = self.model.source.tokenizer
        return [
            fault
            for one, other in zip(hostile, neutral, strict=True)
            for fault in judge(self.family, one, other, tokenizer)
        ]


def trials(family: Family) -> list[Trial]:
    """Return every kind of request to a family."""
    before, after = family.controls[:2]
    framed = BlockTemplate(f"{before}Document: ", after)
    chat = langchain_parts.recording_chat(family)
    framing = langchain_parts.recording_chat(family, block_template=framed)
    made = [
        Trial(f"LangChain, {name}", family, chat, ask)
        for name, ask in langchain_parts.SCENARIOS.items()
    ]
    made.append(Trial("LangChain, framed", family, framing, langchain_parts.by_chain))

    def llm(**fields: Any) -> Any:
        return llama_index_parts.recording_llm(family, **fields)

    own = llama_index_parts.own_template(family)
    plain = llm()
    ways: list[tuple[str, Any, Ask]] = [
        *((name, plain, ask) for name, ask in llama_index_parts.SCENARIOS.items()),
        ("own messages_to_prompt", llm(messages_to_prompt=own), llama_index_parts.by_messages),
        ("framed", llm(block_template=framed), llama_index_parts.by_messages),
        ("no chat", llm(is_chat_model=False), llama_index_parts.by_synthesizer("compact")),
    ]
    return made + [Trial(f"LlamaIndex, {name}", family, model, ask) for name, model, ask in ways]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FAMILIES)
def test_hostile_contents_inject_no_control_tokens_and_split_no_blocks(name: str) -> None:
    every = trials(families()[name])
    count = max(len(every), COUNT // len(FAMILIES))
    found = [
        f"{trial.name}, {number}: {fault.kind}: {fault.detail}"
        for number, trial in zip(range(count), itertools.cycle(every), strict=False)
        for fault in trial.faults(f"{number}, {name}, {trial.name}")
    ]
    assert not found, "\n".join([f"{len(found)} faults", *found[:5]])
