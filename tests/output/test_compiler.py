"""Compiled grammars: allowed tokens, caching and concurrency."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blockattn_rag.errors import GrammarError, UnsupportedModelError
from blockattn_rag.output.compiler import MOST_COMPILED, GrammarCompiler, Matcher
from blockattn_rag.output.grammar import Grammar
from tests.holding import LONGEST_S
from tests.output.grammars import END, TOKENIZER, accepts, compiler, grammar, ids, matcher, nested

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAGS = {
    "triggers": ["<find"],
    "structures": [{"begin": "<find>", "schema": SCHEMA, "end": "</find>"}],
}
NUMBER = {"triggers": ["<f"], "structures": [{"begin": 3, "schema": {}, "end": ">"}]}
VOCABULARY = len(TOKENIZER)


def next_of(one: Matcher) -> set[str]:
    allowed = np.flatnonzero(one.allowed(VOCABULARY, [END]))
    return {TOKENIZER.decode([token], skip_special_tokens=False) for token in allowed}


def test_allowed_tokens_follow_the_grammar() -> None:
    one = matcher(choice=["ja", "jb"])
    assert next_of(one) == {"j"}
    assert one.follow(ids("j"))
    assert next_of(one) == {"a", "b"}
    assert not one.is_complete()


def test_an_answer_may_only_end_when_it_is_complete() -> None:
    one = matcher(regex="ab?")
    assert not one.allowed(VOCABULARY, [END])[END]
    assert accepts(one, "a")
    assert one.allowed(VOCABULARY, [END])[[END, *ids("b")]].all()


def test_a_custom_end_token_replaces_that_of_the_model() -> None:
    one = matcher(regex="a")
    assert accepts(one, "a")
    other = ids("z")[0]
    assert np.flatnonzero(one.allowed(VOCABULARY, [other])).tolist() == [other]


def test_a_matcher_follows_answers_that_are_rolled_back() -> None:
    one = matcher(choice=["abc", "axy"])
    assert one.follow(ids("abc"))
    assert one.follow(ids("ax"))
    assert next_of(one) == {"y"}
    assert not one.follow(ids("aq"))
    assert one.follow(ids("a"))
    assert next_of(one) == {"b", "x"}


def test_matchers_of_one_grammar_are_independent() -> None:
    choices = grammar(choice=["ab"])
    compiled = compiler()
    one, other = compiled.matcher(choices), compiled.matcher(choices)
    assert one.follow(ids("a"))
    assert (next_of(one), next_of(other)) == ({"b"}, {"a"})


def test_recently_used_grammars_are_compiled_once() -> None:
    compiled = compiler()
    first = compiled.start(grammar(regex="a"))
    for number in range(MOST_COMPILED - 1):
        compiled.matcher(grammar(regex=f"{number}"))
    assert compiled.start(grammar(regex="a")) is first
    compiled.matcher(grammar(regex="b"))
    assert compiled.start(grammar(regex="a")) is not first


def test_unexpected_errors_are_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiler()
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match="Structured output needs llguidance"):
        compiled.matcher(grammar(regex="a"))
    monkeypatch.undo()
    assert compiled.matcher(grammar(regex="a"))


def test_a_forked_process_compiles_again() -> None:
    """Threads of the parent that may be compiling do not exist in the child."""
    compiled = compiler()
    regex = grammar(regex="slow")
    compiled._compiled[os.getpid(), regex.kind, regex.text] = Future()  # never completes
    child = os.fork()
    if not child:
        os._exit(0 if compiled.start(regex).result(LONGEST_S) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_slow_grammar_does_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()
    compile_one = GrammarCompiler._compile

    def slow(self: GrammarCompiler, given: Grammar) -> Any:
        if given.text == "slow":
            begun.set()
            assert may_end.wait(LONGEST_S)
        return compile_one(self, given)

    monkeypatch.setattr(GrammarCompiler, "_compile", slow)
    compiled = compiler()
    waiting = compiled.start(grammar(regex="slow"))
    assert begun.wait(LONGEST_S)
    assert next_of(compiled.matcher(grammar(regex="fast"))) == {"f"}
    assert not waiting.done()
    may_end.set()
    assert next_of(compiled.matcher(grammar(regex="slow"))) == {"s"}


def test_a_choice_that_is_a_prefix_of_another_may_end_or_continue() -> None:
    one = matcher(choice=["ab", "abc", 'say "ö"\n', "🏰"])
    assert one.follow(ids("ab"))
    assert one.allowed(VOCABULARY, [END])[[END, ids("c")[0]]].all()
    assert all(accepts(one, text) for text in ("abc", 'say "ö"\n', "🏰"))


def _alternatives(number: int, begin: str) -> str:
    """Return a grammar whose parser needs ``number`` items after the rule ``begin``."""
    cases = " | ".join(f"c{i}" for i in range(number))
    rules = "\n".join(f'c{i}: "x" "{i}"' for i in range(number))
    return f"start: {begin} case\ncase: {cases}\n{rules}"


def test_a_grammar_that_fails_at_its_start_is_refused_when_compiled() -> None:
    with pytest.raises(GrammarError, match=r"The grammar cannot be enforced.* max is 10000"):
        matcher(grammar=_alternatives(10_001, '"a"'))


def test_parser_errors_are_distinguished_from_forbidden_tokens() -> None:
    one = matcher(grammar=_alternatives(10_001, '/a+/ "b"'))
    assert not one.follow(ids("b"))
    with pytest.raises(GrammarError, match=r"cannot be enforced: .* max is 10000") as raised:
        one.follow(ids("aabx"))
    assert "\n" not in str(raised.value)
    with pytest.raises(GrammarError, match="max is 10000"):  # the error persists
        one.follow(ids("aabx1"))


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ({"json": SCHEMA}, '{"a": 12}'),
        ({"json_object": True}, '{"ö": [1, null, "x"]}'),
        ({"regex": "[0-9]{4}"}, "1931"),
        ({"choice": ["蓝", "ja"]}, "蓝"),
        ({"grammar": 'start: "a" /b+/'}, "abb"),
    ],
)
def test_every_kind_is_compiled(outputs: dict[str, Any], text: str) -> None:
    one = matcher(**outputs)
    assert accepts(one, text)
    assert not one.follow(ids("?"))


def test_structural_tags_only_constrain_tagged_text() -> None:
    one = matcher(structural_tag=TAGS)
    assert accepts(one, "Any < text {]")
    assert accepts(one, 'I look: <find>{"a": 3}</find> and more, <find>{"a": 4}</find>.')
    for text in ('<find>{"b"', '<find>{"a": 3} more', "<finder>"):
        assert not one.follow(ids(text))
    assert one.follow(ids('<find>{"a": 3'))
    assert not one.is_complete()


def test_a_schema_that_no_answer_fits_is_refused_in_one_line() -> None:
    with pytest.raises(GrammarError, match="no answer matches it") as raised:
        matcher(json={"$ref": "#"}).allowed(VOCABULARY, [END])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ({"json": {"title": "T", "not": {}}}, "The JSON schema 'T' cannot be compiled"),
        ({"regex": "(a"}, r"The regular expression '\(a' cannot be compiled"),
        ({"json": {"title": "T", **nested(400)}}, "'T' cannot be compiled.*recursion"),
        (
            {"structural_tag": {"x": 1}},
            r"Expected structural_tag to be \{'triggers'.*found \{\"x\": 1\}",
        ),
        ({"structural_tag": [1]}, r"Expected structural_tag to be \{'triggers'.*found \[1\]"),
        ({"structural_tag": NUMBER}, "The structural tag cannot be compiled"),
        (
            {"structural_tag": {**TAGS, "triggers": ["<call"]}},
            "'<find>' does not start with any of the triggers <call",
        ),
        ({"grammar": "start: nothing"}, "The grammar cannot be compiled.*nothing"),
    ],
)
def test_the_error_for_an_invalid_grammar_names_its_kind(outputs: Any, said: str) -> None:
    with pytest.raises(GrammarError, match=said):
        matcher(**outputs)


def test_unsupported_tokenizers_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="The tokenizer of tiny is a SimpleNamespace"):
        compiler(SimpleNamespace()).matcher(grammar(regex="a"))
