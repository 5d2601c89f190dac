"""What must hold of every prompt, judged by its token ids and nothing of how it was made.

Control tokens: the ids of a hostile conversation hold those of the same conversation in innocuous
words, and no other. Passages: each is one block, with its text. Contents: they reach the model as
they were typed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from blockattn_rag.prompts.blocks import Block, BlockPrompt
from tests.hostile.families import Family

MARKER = "kvblock:"


class Fault(NamedTuple):
    """What was found wrong, and where."""

    kind: str
    detail: str


@dataclass(frozen=True)
class Asked:
    """The prompts of one request to a framework.

    Args:
        prompts: in the order in which the model was asked.
        passages: canonical texts, each to be one block of one prompt, in this order.
        typed: contents that every prompt must hold as they are.
        in_final: contents that every prompt's final block must hold.
        cut: the framework may cut passages; then their words must all reach the model.
        contents: all that anybody wrote, for counting what looks like a marker.
        thoughts: earlier answers with ``</think>``, which a template may write anew.
    """

    prompts: Sequence[BlockPrompt]
    passages: Sequence[str]
    typed: Sequence[str] = ()
    in_final: Sequence[str] = ()
    cut: bool = False
    contents: Sequence[str] = ()
    thoughts: int = 0


class Reading(NamedTuple):
    """A prompt as the model sees it."""

    controls: list[str]
    context: list[str]
    final: str

    @property
    def text(self) -> str:
        return "".join([*self.context, self.final])


def read(family: Family, prompt: BlockPrompt, tokenizer: Any) -> Reading:
    """A prompt's control tokens and the texts of its blocks, decoded from its ids."""
    ids = tokenizer.prompt_ids(prompt)
    return Reading(
        family.controls_in(ids.flat),
        [family.decoded(i) for i in ids.context],
        family.decoded(ids.final),
    )


def passage_blocks(prompt: BlockPrompt) -> list[tuple[int, Block]]:
    """The blocks that are passages, with their places."""
    found = []
    for place, block in enumerate(prompt.context):
        if any(span.origin in ("passage", "altered") for span in block.spans):
            found.append((place, block))
    return found


def judge(family: Family, hostile: Asked, neutral: Asked, tokenizer: Any) -> list[Fault]:
    """All that is wrong with the prompts of a request. ``neutral``: the same in harmless words."""
    faults = _judge_neutral(family, neutral, tokenizer)
    allowed = [read(family, prompt, tokenizer).controls for prompt in neutral.prompts]
    if not hostile.prompts or (not hostile.cut and len(hostile.prompts) != len(neutral.prompts)):
        faults.append(Fault("prompts", f"{len(hostile.prompts)}, not {len(neutral.prompts)}"))
    for prompt in hostile.prompts:
        reading = read(family, prompt, tokenizer)
        if _without_thoughts(reading.controls, hostile.thoughts) not in allowed:
            faults.append(Fault("control", f"{reading.controls}, not one of {allowed}"))
        faults += _judge_blocks(family, prompt, reading)
        faults += _judge_contents(family, hostile, reading)
    return faults + _judge_passages(family, hostile, tokenizer)


def _judge_neutral(family: Family, asked: Asked, tokenizer: Any) -> list[Fault]:
    """Harmless conversations have the ids that transformers gives them, block by block."""
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
    """Ids, or, where control tokens swallow the blanks beside them, text without any blanks: it is
    open whether they may swallow those of a content."""
    if not family.swallows_blanks:
        return ids
    return family.controls_in(ids), "".join(family.decoded(ids).split())


def _without_thoughts(controls: list[str], most: int) -> list[str]:
    """Less the ``<think>``, ``</think>`` that a template wrote itself at the start of a turn."""
    kept: list[str] = []
    for control in controls:
        if most and control == "</think>" and kept[-2:] == ["<|im_start|>", "<think>"]:
            kept.pop()
            most -= 1
        else:
            kept.append(control)
    return kept


def _judge_blocks(family: Family, prompt: BlockPrompt, reading: Reading) -> list[Fault]:
    """A passage's block decodes to its text between the block template's."""
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


def _judge_passages(family: Family, asked: Asked, tokenizer: Any) -> list[Fault]:
    """Each passage is one block; of cut ones, each word is in some prompt."""
    found = [block.text for prompt in asked.prompts for _, block in passage_blocks(prompt)]
    if not asked.cut:
        if found != list(asked.passages):
            return [Fault("passages", f"blocks {found}, not {list(asked.passages)}")]
        return []
    text = "\n".join(read(family, prompt, tokenizer).text for prompt in asked.prompts)
    words = {word for passage in asked.passages for word in passage.split()}
    lost = sorted(word for word in words if family.as_decoded(word) not in text)
    whole = [block for block in found if not any(block in passage for passage in asked.passages)]
    return [Fault("lost", f"{lost}")] * bool(lost) + [Fault("passages", f"{whole}")] * bool(whole)


def _judge_contents(family: Family, asked: Asked, reading: Reading) -> list[Fault]:
    """What was typed is there, and no marker but those that somebody typed."""
    faults = []
    for content in asked.typed:
        if family.as_decoded(content.strip()) not in reading.text:
            faults.append(Fault("typed", f"{content!r} is not in {reading.text!r}"))
    for content in asked.in_final:
        if family.as_decoded(content.strip()) not in reading.final:
            faults.append(Fault("typed", f"{content!r} is not in the end {reading.final!r}"))
    markers = reading.text.count(MARKER)
    typed = sum(family.as_decoded(content).count(MARKER) for content in asked.contents)
    if markers > typed and not (asked.cut and typed):
        faults.append(Fault("marker", f"{markers} markers of {typed}: {reading.text!r}"))
    return faults
