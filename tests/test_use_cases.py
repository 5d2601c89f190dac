"""The use cases that need a more capable model than the bundled one work with scripted answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "benchmarks" / "use_cases"))

from registry import all_uses

from tests.scripted import Script

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


SELECTION = '{"name": "SingleSelection", "arguments": {"index": 1, "reason": ""}}'
SUB_QUESTIONS = '```json\n{"items": [{"sub_question": "How tall?", "tool_name": "towers"}]}\n```'


def asked_for(word: str, answer: str) -> Script:
    """Return a script that gives ``answer`` to prompts with a word, and another one otherwise."""
    return lambda prompt: answer if word in prompt else "Tall."


FOLLOWED: dict[str, Script] = {
    "load_qa_chain: map_rerank": lambda _: "214 metres.\nScore: 90",
    "LLMChainFilter": lambda _: "YES",
    "LLMListwiseRerank": lambda _: '{"ranked_document_ids": [1, 0]}',
    "PydanticOutputParser, its instructions in the prompt": lambda _: '{"metres": 214}',
    "create_react_agent: calls written in words": lambda _: " I know.\nFinal Answer: 214 metres.",
    "RouterQueryEngine: PydanticSingleSelector": asked_for(
        "SingleSelection", f"<tool_call>\n{SELECTION}\n</tool_call>"
    ),
    "RouterQueryEngine: LLMSingleSelector": asked_for("choice", '[{"choice": 1, "reason": ""}]'),
    "SubQuestionQueryEngine": asked_for("sub_question", SUB_QUESTIONS),
    "LLMRerank": asked_for("Relevance", "Doc: 1, Relevance: 9"),
    "LLMTextCompletionProgram": lambda _: '{"metres": 214}',
    "FactExtractionMemoryBlock": lambda _: "<facts><fact>It is 214 metres.</fact></facts>",
}
"""Answers that a capable model would give."""


def test_the_table_in_the_docs_has_every_use_case() -> None:
    rows = json.loads((RESULTS / "use-cases.json").read_text("utf-8"))["rows"]
    shown = [(row["framework"], row["use"]) for row in rows]
    assert shown == [(use.framework, use.name) for use in all_uses()]
    assert {row["use"] for row in rows if row["ours"]["result"] == "unread"} == set(FOLLOWED)
