"""Grammars compiled for one tokenizer, by llguidance.

llguidance needs no other package, refuses what it cannot hold a model to, and knows JSON schemas,
regular expressions and grammars alike.
"""

from __future__ import annotations

import copy
import json
import logging
import threading
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from blockattn_rag.errors import GrammarError, UnsupportedModelError
from blockattn_rag.lazy import missing_extra
from blockattn_rag.structured.grammar import Grammar
from blockattn_rag.structured.schema import prepared

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger("blockattn_rag")

MOST_COMPILED = 64
"""Grammars that are kept compiled: some 100 KiB each."""

# A model that may write any number of blanks may write nothing else, and indentation takes tokens.
_WHITESPACE = " ?"


class Matcher:
    """Follows one answer, and tells which tokens may come next.

    Args:
        matcher: a fresh one.
        own_ends: tokens that end an answer, as llguidance has them.
    """

    def __init__(self, matcher: LLMatcher, own_ends: Sequence[int]) -> None:
        self._matcher = matcher
        self._own_ends = list(own_ends)
        self._ids: list[int] = []

    def fresh(self) -> Matcher:
        """A matcher of another answer, at its beginning."""
        matcher = self._matcher.deep_copy()
        matcher.reset()
        return Matcher(matcher, self._own_ends)

    def follow(self, ids: Sequence[int]) -> bool:
        """Take the answer so far; whether it fits the grammar.

        Args:
            ids: all its tokens, which need not begin with those that were given before.
        """
        same = next(
            (at for at, (a, b) in enumerate(zip(self._ids, ids, strict=False)) if a != b),
            min(len(self._ids), len(ids)),
        )
        if same < len(self._ids) and not self._matcher.rollback(len(self._ids) - same):
            self._matcher.reset()
            same = 0
        taken = self._matcher.try_consume_tokens(list(ids[same:]))
        self._ids = list(ids[: same + taken])
        return same + taken == len(ids)

    def is_complete(self) -> bool:
        """Whether the answer so far is all that was asked for; more may still fit."""
        return bool(self._matcher.is_accepting())

    def allowed(self, vocabulary: int, ends: Collection[int]) -> NDArray[np.bool_]:
        """Which tokens may come next: bool ``[vocabulary]``.

        Args:
            vocabulary: how many tokens the model predicts.
            ends: tokens that end the answer; they may come when it is complete.

        Raises:
            GrammarError: the grammar is too complex here.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            found = self._matcher.get_error().partition("\n")[0]  # the parser's state follows
            raise GrammarError(
                f"the grammar cannot be followed: {found}. It asks for what no answer can be, as a "
                "schema that refers to nothing but itself does, or is too complex"
            )
        known = np.unpackbits(bits, bitorder="little")[:vocabulary]
        allowed = np.zeros(vocabulary, bool)
        allowed[: len(known)] = known
        allowed[self._own_ends] = False
        allowed[list(ends)] = self.is_complete()
        return allowed


class GrammarCompiler:
    """Compiles grammars for one model's tokenizer, and keeps the last ones. Safe in many threads.

    Args:
        tokenizer: a transformers tokenizer.
        ends: tokens that end an answer.
        name: the model's, for messages.
    """

    def __init__(self, tokenizer: Any, ends: Collection[int], name: str) -> None:
        self._tokenizer = tokenizer
        self._ends = sorted(ends)
        self._name = name
        self._lock = threading.Lock()
        self._known: LLTokenizer | None = None
        self._compiled = lru_cache(MOST_COMPILED)(self._compile)

    def matcher(self, grammar: Grammar) -> Matcher:
        """A fresh matcher.

        Raises:
            GrammarError: the grammar cannot be compiled.
            UnsupportedModelError: the tokenizer is of a kind that grammars cannot be compiled for.
            ImportError: llguidance is missing.
        """
        with self._lock:
            return self._compiled(grammar).fresh()

    def _compile(self, grammar: Grammar) -> Matcher:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            needed = missing_extra("llguidance", "structured")
            raise ImportError(f"structured output needs {needed}") from error
        if self._known is None:
            self._known = _ll_tokenizer(self._tokenizer, self._ends, self._name)
        try:
            text = _ll_grammar(grammar)
            failed, said = LLMatcher.validate_grammar_with_warnings(text, self._known)
        except (ValueError, KeyError, TypeError, AssertionError, RecursionError) as error:
            failed, said = True, [str(error)]
        if failed:
            raise GrammarError(
                f"{grammar.name} cannot be compiled: {' '.join(said)}. Leave out or replace what "
                "it names (docs/guides/structured_output.md)"
            )
        for warning in said:
            logger.warning("%s: %s", grammar.name, warning)
        return Matcher(LLMatcher(self._known, text, log_level=0), self._ends)


def _ll_tokenizer(tokenizer: Any, ends: Sequence[int], name: str) -> LLTokenizer:
    from llguidance import LLTokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModelError(
            f"{name} has a {type(tokenizer).__name__}; grammars need one of the tokenizers library"
        )
    backend = copy.copy(backend)
    backend.no_padding()
    backend.no_truncation()
    try:
        return LLTokenizer(backend.to_str(), eos_token=list(ends) or None)
    except ValueError as error:
        raise UnsupportedModelError(
            f"grammars cannot be compiled for the tokenizer of {name}: {error}"
        ) from error


def _ll_grammar(grammar: Grammar) -> str:
    """A grammar in llguidance's own form."""
    from llguidance import LLMatcher, StructTag, grammar_from

    if grammar.kind == "json" or grammar.kind == "json_object":
        schema = prepared(json.loads(grammar.text))
        defaults: Any = {"whitespace_pattern": _WHITESPACE}
        return LLMatcher.grammar_from_json_schema(schema, defaults=defaults)
    if grammar.kind == "structural_tag":
        given = json.loads(grammar.text)
        if not isinstance(given, dict) or not {"triggers", "structures"} <= {*given}:
            raise ValueError(
                "expected {'triggers': [...], 'structures': [{'begin': ..., 'schema': ..., "
                f"'end': ...}}]}}, found {grammar.text[:200]}"
            )
        return StructTag.to_grammar(
            [
                StructTag(
                    trigger=_trigger(one["begin"], given["triggers"]),
                    begin=one["begin"],
                    grammar=prepared(one["schema"]),
                    end=one["end"],
                )
                for one in given["structures"]
            ]
        )
    return grammar_from(grammar.kind, grammar.text)


def _trigger(begin: str, triggers: Sequence[str]) -> str:
    for trigger in triggers:
        if begin.startswith(trigger):
            return trigger
    raise ValueError(f"{begin!r} begins with none of the triggers {', '.join(triggers)}")
