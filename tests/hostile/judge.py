"""Checks of prompts based on their token ids. Control tokens: a hostile conversation has the same
ones as its harmless version. Passages: each is exactly one block with its text. Contents: they
reach the model unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from blockattn_rag.prompts.blocks import Block, BlockPrompt
from tests.hostile.families import Family
from tests.hostile.texts import Sample

MARKER = "kvblock:"


class Fault(NamedTuple):
    kind: str
    detail: str


@dataclass(frozen=True)
class Asked:
    """Prompts that a framework created for one request.

    Args:
        prompts: Prompts in the order in which they were sent to the model.
        passages: Canonical texts, each of which must be one block of one prompt, in this order.
        typed: Contents that every prompt must contain unchanged.
        in_final: Contents that the final block of every prompt must contain.
        sample: The conversation. Its texts may contain markers.
        thoughts: Number of earlier answers with ``</think>``, which a template may rewrite.
    """

    prompts: Sequence[BlockPrompt]
    passages: Sequence[str]
    typed: Sequence[str] = ()
    in_final: Sequence[str] = ()
    sample: Sample | None = None
    thoughts: int = 0

    @property
    def contents(self) -> list[str]:
        """All contents, repeated as often as a prompt may contain them."""
        if (sample := self.sample) is None:
            return [*self.passages]
        return [*sample.everything, sample.argument, sample.argument, *self.passages]


class Reading(NamedTuple):
    """A decoded prompt, as the model receives it."""

    controls: list[str]
    context: list[str]
    final: str

    @property
    def text(self) -> str:
        return "".join([*self.context, self.final])


def read(family: Family, prompt: BlockPrompt, tokenizer: Any) -> Reading:
    """Decode the control tokens and the texts of the blocks from the ids of a prompt."""
    ids = tokenizer.prompt_ids(prompt)
    return Reading(
        family.controls_in(ids.flat),
        [family.decoded(i) for i in ids.context],
        family.decoded(ids.final),
    )


def passage_blocks(prompt: BlockPrompt) -> list[tuple[int, Block]]:
    """Return the blocks that are passages, with their indices."""
    return [(place, block) for place, block in enumerate(prompt.context) if block.is_passage]


def judge(family: Family, hostile: Asked, neutral: Asked, tokenizer: Any) -> list[Fault]:
    """Return all faults in the prompts of a request. ``neutral``: its harmless version."""
    faults = _judge_neutral(family, neutral, tokenizer)
    allowed = [read(family, prompt, tokenizer).controls for prompt in neutral.prompts]
    if not hostile.prompts or len(hostile.prompts) != len(neutral.prompts):
        faults.append(Fault("prompts", f"{len(hostile.prompts)}, not {len(neutral.prompts)}"))
    for prompt in hostile.prompts:
        reading = read(family, prompt, tokenizer)
        if _without_thoughts(reading.controls, hostile.thoughts) not in allowed:
            faults.append(Fault("control", f"{reading.controls}, not one of {allowed}"))
        faults += _judge_blocks(family, prompt, reading)
        faults += _judge_contents(family, hostile, reading)
    blocks = [block.text for prompt in hostile.prompts for _, block in passage_blocks(prompt)]
    if blocks != list(hostile.passages):
        faults.append(Fault("passages", f"blocks {blocks}, not {list(hostile.passages)}"))
    return faults


def _judge_neutral(family: Family, asked: Asked, tokenizer: Any) -> list[Fault]:
    """Check that harmless conversations have the same ids as in transformers, block by block."""
    faults = []
    for prompt in asked.prompts:
        ids = tokenizer.prompt_ids(prompt)
        texts = [*(block.rendered for block in prompt.context), prompt.final]
        for place, (text, found) in enumerate(zip(texts, [*ids.context, ids.final], strict=True)):
            expected = family.parsed(text)
            if place == 0 and expected[: len(tokenizer.prefix_ids)] != tokenizer.prefix_ids:
                expected = [*tokenizer.prefix_ids, *expected]
            if _without_swallowed(family, found) != _without_swallowed(family, expected):
                faults.append(Fault("neutral ids", f"{found} of {text!r}, not {expected}"))
    return faults


def _without_swallowed(family: Family, ids: list[int]) -> Any:
    """Return the ids, or text without white space if control tokens remove adjacent white space."""
    if not family.swallows_blanks:
        return ids
    return family.controls_in(ids), "".join(family.decoded(ids).split())


def _without_thoughts(controls: list[str], most: int) -> list[str]:
    """Remove each ``</think>`` that directly follows a ``<think>`` at the start of a turn."""
    kept: list[str] = []
    for control in controls:
        if most and control == "</think>" and kept[-2:] == ["<|im_start|>", "<think>"]:
            kept.pop()
            most -= 1
        else:
            kept.append(control)
    return kept


def _judge_blocks(family: Family, prompt: BlockPrompt, reading: Reading) -> list[Fault]:
    """Check that the block of each passage decodes to its text inside the block template."""
    if len(reading.context) != len(prompt.context):
        return [Fault("blocks", f"{len(reading.context)} of {len(prompt.context)} have tokens")]
    faults = []
    bos = str(family.tokenizer.bos_token or "")
    for place, block in passage_blocks(prompt):
        found = reading.context[place].removeprefix(bos if place == 0 else "").lstrip(" ")
        expected = family.as_decoded(block.rendered).lstrip(" ")
        if found != expected:
            faults.append(Fault("block text", f"{found!r}, not {expected!r}"))
    return faults


def _judge_contents(family: Family, asked: Asked, reading: Reading) -> list[Fault]:
    """Check that all contents are present, and that no markers were added."""
    faults = [
        Fault("typed", f"{content!r} is not in {text!r}")
        for contents, text in ((asked.typed, reading.text), (asked.in_final, reading.final))
        for content in contents
        if family.as_decoded(content.strip()) not in text
    ]
    markers = reading.text.count(MARKER)
    typed = sum(family.as_decoded(content).count(MARKER) for content in asked.contents)
    if markers > typed:
        faults.append(Fault("marker", f"{markers} markers of {typed}: {reading.text!r}"))
    return faults
