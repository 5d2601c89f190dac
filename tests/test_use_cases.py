"""What the table of uses says of what came of each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import llama_index.core
import pytest
from langchain_core.exceptions import OutputParserException
from llama_index.core import Settings

sys.path.append(str(Path(__file__).parents[1] / "benchmarks" / "use_cases"))

import kits
from outcomes import Outcome, Row, counts, summary, table, tried
from registry import Use, all_uses

from blockattn_rag.errors import IncompleteAnswerError
from tests.scripted import Script, ScriptedEngine

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


class Kit:
    def prepare(self) -> None:
        pass


def raising(error: Exception) -> Any:
    def run(kit: Kit) -> Any:
        raise error

    return run


@pytest.mark.parametrize(
    ("run", "by_format", "result", "error"),
    [
        (lambda _: "an answer", False, "works", None),
        (lambda _: "", False, "fails", "not as promised"),
        (lambda _: "", True, "unread", "not as promised"),
        (raising(NotImplementedError()), False, "fails", "NotImplementedError"),
        (raising(NotImplementedError()), True, "fails", "NotImplementedError"),
        (raising(ValueError()), False, "fails", "ValueError"),
        (raising(ValueError()), True, "unread", "ValueError"),
        (raising(OutputParserException("no")), False, "unread", "OutputParserException"),
        (raising(IncompleteAnswerError("{", "cut")), False, "unread", "IncompleteAnswerError"),
    ],
)
def test_a_model_that_writes_badly_is_told_from_a_use_that_fails(
    run: Any, by_format: bool, result: str, error: str | None
) -> None:
    assert tried(Use("LangChain", "a use", run, by_format), Kit()) == Outcome(result, error)


def test_a_peer_that_is_not_installed_is_told() -> None:
    assert str(tried(Use("LangChain", "a use", bool), None)) == "not installed"


def test_the_table_tells_reuse_and_counts_what_a_peer_alone_can_do() -> None:
    works = Outcome("works", None, prompt_tokens=200, reused_tokens=150)
    fails = Outcome("fails", "ValueError")
    rows = [Row("LangChain", "one", works, fails), Row("LangChain", "two", fails, works)]
    assert table(rows).splitlines()[2] == (
        "| LangChain | one | works with reuse (75 %) | fails: ValueError |"
    )
    assert counts(rows)["only_peer"] == ["two"]
    assert summary(rows).endswith("Work with the latter alone: two.")
    assert "1 work, 0 need a more able model, 1 fail; 1 reuse blocks" in summary(rows)


def test_nothing_that_a_peer_can_do_fails_in_the_table_that_is_shown() -> None:
    told = json.loads((RESULTS / "use-cases.json").read_text("utf-8"))
    rows = [
        Row(row["framework"], row["use"], Outcome(**row["ours"]), Outcome(**row["peer"]))
        for row in told["rows"]
    ]
    assert counts(rows) == told["counts"]
    assert told["counts"]["only_peer"] == []
    assert told["counts"]["peer"].keys() <= {"works", "unread", "fails"}  # all were installed
    assert (RESULTS / "use-cases.md").read_text("utf-8").startswith(table(rows))


def test_the_table_that_is_shown_has_every_use() -> None:
    told = json.loads((RESULTS / "use-cases.json").read_text("utf-8"))
    shown = [(row["framework"], row["use"]) for row in told["rows"]]
    assert shown == [(use.framework, use.name) for use in all_uses()]


SELECTION = '{"name": "SingleSelection", "arguments": {"index": 1, "reason": ""}}'
SUB_QUESTIONS = '```json\n{"items": [{"sub_question": "How tall?", "tool_name": "towers"}]}\n```'


def asked_for(word: str, answer: str) -> Script:
    """Gives an answer to prompts with a word in them, and another one to others."""
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
"""What an able model would write."""


@pytest.mark.parametrize("use_name", FOLLOWED)
def test_what_needs_a_more_able_model_works_with_one(
    use_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [use] = [use for use in all_uses() if use.name == use_name]
    for limit in ("TOKENS", "OBJECT_TOKENS"):
        monkeypatch.setattr(kits, limit, 200)
    for name in ("_llm", "_embed_model", "_prompt_helper", "_tokenizer"):
        monkeypatch.setattr(Settings, name, None)  # taken back after the test
    monkeypatch.setattr(llama_index.core, "global_tokenizer", None)
    make = {"LangChain": kits.own_langchain, "LlamaIndex": kits.own_llama_index}[use.framework]
    assert tried(use, make(ScriptedEngine(FOLLOWED[use_name])), trace=True) == Outcome("works")


def test_all_that_needs_a_more_able_model_is_tried_with_one() -> None:
    told = json.loads((RESULTS / "use-cases.json").read_text("utf-8"))
    assert {r["use"] for r in told["rows"] if r["ours"]["result"] == "unread"} == set(FOLLOWED)
