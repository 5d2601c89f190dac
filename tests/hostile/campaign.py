"""Runs hostile conversations through every family and every part, and counts what was found."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from blockattn_rag.prompts.blocks import BlockTemplate
from tests.hostile import langchain_parts, llama_index_parts
from tests.hostile.families import Family, families
from tests.hostile.judge import Asked, Fault, judge
from tests.hostile.texts import Attacker, Sample


@dataclass
class Tally:
    """What a run asked, and what it found."""

    prompts: int = 0
    passages: int = 0
    titles: int = 0
    questions: int = 0
    histories: int = 0
    tool_results: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add(self, sample: Sample, asked: list[Asked], scenario: str) -> None:
        self.prompts += sum(len(one.prompts) for one in asked)
        self.passages += len(sample.passages)
        self.titles += sum(bool(passage.title) for passage in sample.passages)
        self.questions += 1
        self.histories += len(sample.history)
        self.tool_results += scenario.endswith("tool")

    def blame(self, place: str, faults: list[Fault], sample: Any) -> None:
        for fault in faults:
            self.faults[f"{place}: {fault.kind}"] += 1
            if self.faults[f"{place}: {fault.kind}"] == 1:
                self.examples.append(f"{place}: {fault.kind}: {fault.detail}\n    of {sample}")

    def __str__(self) -> str:
        counts = (
            f"{self.prompts} prompts of {self.passages} passages, {self.titles} titles, "
            f"{self.questions} questions, {self.histories} turns of history, "
            f"{self.tool_results} tool results"
        )
        return f"{counts}: {sum(self.faults.values())} faults"


Ask = Callable[[Family, Any, Sample], list[Asked]]


@dataclass(frozen=True)
class Trial:
    """One way to ask models of one family. ``model``: a recording one of either framework."""

    name: str
    family: Family
    model: Any
    ask: Ask
    long: bool = False

    def run(self, seed: str, tally: Tally) -> None:
        """Ask a hostile sample and the same in harmless words, and judge the one by the other."""
        sample = Attacker(seed, self.family.controls).sample(long=self.long)
        neutral = self.ask(self.family, self.model, sample.neutral())
        try:
            hostile = self.ask(self.family, self.model, sample)
        except Exception as error:  # noqa: BLE001 -- what cannot be asked is a finding
            tally.blame(self.name, [Fault("raised", repr(error))], sample)
            return
        tally.add(sample, hostile, self.name)
        for one, other in zip(hostile, neutral, strict=True):
            faults = judge(self.family, one, other, self.model.source.tokenizer)
            tally.blame(self.name, faults, sample)


def trials(family: Family) -> list[Trial]:
    """Every way to ask models of a family."""
    llm = llama_index_parts.recording_llm(family)
    small = llama_index_parts.recording_llm(family, context_window=llama_index_parts.SMALL)
    own = llama_index_parts.recording_llm(
        family, messages_to_prompt=llama_index_parts.own_template(family)
    )
    plain = llama_index_parts.recording_llm(family, is_chat_model=False)
    chat = langchain_parts.recording_chat(family)
    before, after = family.controls[:2]
    framed = BlockTemplate(f"{before}Document: ", after)
    framing = llama_index_parts.recording_llm(family, block_template=framed)
    framing_chat = langchain_parts.recording_chat(family, block_template=framed)

    made: list[Trial] = []
    for name, ask_chat in langchain_parts.SCENARIOS.items():
        made.append(Trial(f"{family.name}: LangChain, {name}", family, chat, ask_chat))
    made.append(
        Trial(f"{family.name}: LangChain, framed", family, framing_chat, langchain_parts.by_chain)
    )
    for configured in (True, False):
        place = f"{family.name}: LlamaIndex {'with' if configured else 'without'} configure"

        def trial(name: str, model: Any, ask: Ask, *, long: bool = False) -> None:
            ask = llama_index_parts.within_settings(ask, configured=configured)  # noqa: B023
            made.append(Trial(f"{place}, {name}", family, model, ask, long))  # noqa: B023

        for name, ask in llama_index_parts.SCENARIOS.items():
            trial(name, llm, ask)
        for mode in llama_index_parts.MODES[:3]:
            trial(f"{mode}, cut", small, llama_index_parts.by_cutting(mode), long=True)
        trial("own messages_to_prompt", own, llama_index_parts.by_messages)
        trial("framed", framing, llama_index_parts.by_messages)
        trial("no chat model", plain, llama_index_parts.by_synthesizer("compact"))
    return made


def run(
    count: int, seed: int = 0, *, only: str = "", within: Iterable[Family] | None = None
) -> Tally:
    """Ask ``count`` conversations, all families and parts in turn.

    Args:
        only: a part of the names of the trials to run.
        within: families; None for all.
    """
    tally = Tally()
    chosen = families().values() if within is None else within
    every = [trial for family in chosen for trial in trials(family) if only in trial.name]
    for number, trial in zip(range(count), itertools.cycle(every), strict=False):
        trial.run(f"{seed}, {number}, {trial.name}", tally)
    return tally
