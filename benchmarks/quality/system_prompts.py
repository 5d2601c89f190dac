"""Reuse of one collection under two system prompts: hits, and correct answers in both modes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from choices import OTHER_SYSTEM
from sets import Item
from tables import markdown

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.lab.evaluation.metrics import bootstrap_mean
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.formats import CHAT, PromptFormat

FORMS = {"ingested": CHAT, "other": replace(CHAT, system=OTHER_SYSTEM)}
"""Prompt formats by the name of their system prompt. Passages are ingested with the first."""

MODES = ("full", "block")
ROWS = [f"{system}, {mode}" for system in FORMS for mode in MODES]


@dataclass(frozen=True, slots=True)
class SystemRecord:
    """Answer to a question under a system prompt.

    Args:
        hits, blocks: Number of passages whose keys and values were stored, and of all passages.
            0 in full mode, which reuses nothing.
    """

    set: str
    id: str
    row: str
    right: int
    hits: int
    blocks: int
    output: str

    @property
    def name(self) -> str:
        return self.row


def answers(
    engine: BlockAttentionEngine, max_new_tokens: int, item: Item, rows: Sequence[str]
) -> Iterator[SystemRecord]:
    """Encode a question's passages under the first system prompt, then answer in the given rows."""
    passages = _prompt(engine, FORMS["ingested"], item).context[1:]
    engine.precompute(passages)
    for row in rows:
        system, mode = row.split(", ")
        prompt = _prompt(engine, FORMS[system], item)
        engine.precompute(prompt.context[:1], as_prompt=True)  # The system prompt itself.
        stored = sum(engine.contains(passage) for passage in prompt.context[1:])
        is_block = mode == "block"
        found = engine.generate(
            prompt,
            mode="block" if is_block else "full",
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
        if is_block and stored + 1 != found.stats.hits:
            raise SystemExit(f"{item.id}: {stored} passages stored, but {found.stats.hits} hits")
        yield SystemRecord(
            set=item.set,
            id=item.id,
            row=row,
            right=int(item.is_right(found.text)),
            hits=stored * is_block,
            blocks=len(passages) * is_block,
            output=found.text,
        )


def _prompt(engine: BlockAttentionEngine, form: PromptFormat, item: Item) -> BlockPrompt:
    return form.prompt(item.question, item.passages, engine.model.tokenizer.tokenizer)


def system_table(records: Sequence[SystemRecord]) -> str:
    """Format the hits and the correct answers of each system prompt, on questions that have a
    record in every row."""
    by_row = {row: {(one.set, one.id): one for one in records if one.row == row} for row in ROWS}
    keys = [key for key in by_row[ROWS[0]] if all(key in rows for rows in by_row.values())]
    lines = []
    for system in FORMS:
        full, block = ([by_row[f"{system}, {mode}"][key] for key in keys] for mode in MODES)
        change = bootstrap_mean([b.right - f.right for f, b in zip(full, block, strict=True)])
        hits, blocks = sum(one.hits for one in block), sum(one.blocks for one in block)
        lines.append(
            (
                system,
                f"{hits:,} of {blocks:,}",
                f"{sum(one.right for one in full)} of {len(keys)}",
                sum(one.right for one in block),
                "{:+.1%} ({:+.1%} to {:+.1%})".format(*change),
            )
        )
    head = ["system prompt", "hits", "right in full mode", "in block mode", "difference (95 %)"]
    return markdown(head, lines)
