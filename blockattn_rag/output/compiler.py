"""Compiles grammars for a tokenizer with llguidance.

llguidance has no dependencies, compiles JSON schemas, regular expressions and Lark grammars, and
rejects constraints that it cannot enforce.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from blockattn_rag.errors import GrammarError, UnsupportedModelError
from blockattn_rag.lazy import missing_extra
from blockattn_rag.output.grammar import Grammar, choice_grammar
from blockattn_rag.output.schema import check_lark, check_schema, prepared

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger("blockattn_rag")

MOST_COMPILED = 64
"""Maximum number of compiled grammars in the cache. Most take about 100 KiB."""

MOST_ALTERNATIVES = 10_000
"""Maximum number of parser items per position: at least one per ``anyOf`` case or tool, four per
optional property. At this limit, tokens take up to 150 ms each. llguidance's default is 2,000."""

# At most one space, because small models may repeat white space until the answer is cut off.
_WHITESPACE = " ?"


class Matcher:
    """Tracks one answer, and computes which tokens may come next."""

    def __init__(self, matcher: LLMatcher, own_ends: Sequence[int], name: str) -> None:
        self._matcher = matcher
        self._own_ends = list(own_ends)
        self._name = name
        self._ids: list[int] = []

    def follow(self, ids: Sequence[int]) -> bool:
        """Consume all tokens of the answer so far, and return whether they match the grammar."""
        if self._ids != list(ids[: len(self._ids)]):
            self._matcher.reset()
            self._ids = []
        new = list(ids[len(self._ids) :])
        consumed = self._matcher.try_consume_tokens(new)
        self._check()
        self._ids += new[:consumed]
        return consumed == len(new)

    def is_complete(self) -> bool:
        """Whether the answer so far is complete. More tokens may still be allowed."""
        return bool(self._matcher.is_accepting())

    def allowed(self, vocabulary: int, ends: Collection[int]) -> NDArray[np.bool_]:
        """Compute whether each token may come next, bool ``[vocabulary]``.

        ``ends``: Ids of the tokens that end an answer, which are allowed once it is complete.
        """
        allowed = self._mask(vocabulary)
        allowed[self._own_ends] = False
        allowed[list(ends)] = self.is_complete()
        return allowed

    def check_begins(self) -> None:
        """Raise GrammarError if the first token fails, as with most grammars that are too large."""
        self.follow(np.flatnonzero(self._mask())[:1].tolist())

    def _mask(self, size: int | None = None) -> NDArray[np.bool_]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, count=size, bitorder="little").view(np.bool_)

    def _check(self) -> None:
        # After an error, llguidance's matcher raises nothing: it only allows the end of the answer.
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]
            raise GrammarError(
                f"{_capitalized(self._name)} cannot be enforced: {reason}. It is too large or too "
                "complex, or no answer matches it (for example, a schema that only refers to "
                "itself). Use fewer anyOf cases, tools or optional properties"
            )


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and caches recent ones. Thread-safe.

    A grammar is compiled in its own thread, so a slow one delays neither the model nor other
    grammars. Concurrent calls with equal grammars share the result.
    """

    def __init__(self, tokenizer: Any, ends: Collection[int], name: str) -> None:
        self._tokenizer = tokenizer
        self._ends = sorted(ends)
        self._name = name
        self._compiled: dict[tuple[int, str, str], Future[LLMatcher | str]] = {}

    def start(self, grammar: Grammar) -> Future[LLMatcher | str]:
        """Compile a grammar in the background. If it is invalid, the result is an error message."""
        key = os.getpid(), grammar.kind, grammar.text  # Threads do not survive a fork.
        new: Future[LLMatcher | str] = Future()
        if (compiled := self._compiled.setdefault(key, new)) is not new:
            return compiled
        for oldest in [*self._compiled][:-MOST_COMPILED]:
            self._compiled.pop(oldest, None)

        def work() -> None:
            try:
                new.set_result(self._compile(grammar))
            except GrammarError as error:
                new.set_result(str(error))
            except BaseException as error:  # noqa: BLE001 -- reraised by `matcher`
                self._compiled.pop(key, None)  # The next call retries.
                new.set_exception(error)

        try:
            threading.Thread(target=work, name="blockattn-grammar", daemon=True).start()
        except RuntimeError:  # No thread can be started.
            work()
        return new

    def matcher(self, grammar: Grammar) -> Matcher:
        """Create a matcher for a new answer, after waiting for the grammar to be compiled."""
        compiled = self.start(grammar).result()
        if isinstance(compiled, str):
            # Create a new error each time, because tracebacks keep frames alive.
            raise GrammarError(compiled)
        return Matcher(compiled.deep_copy(), self._ends, grammar.name)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            needed = missing_extra("llguidance", "structured")
            raise ImportError(f"Structured output needs {needed}") from error
        try:
            text = _ll_grammar(grammar)
        except RecursionError:
            raise _refused(grammar, "it is nested too deeply") from None
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise _refused(grammar, str(error)) from error
        # Verbose errors quote the grammar and the answer, which must not be logged.
        limits = LLParserLimits(max_items_in_row=MOST_ALTERNATIVES, verbose_errors=False)
        compiled = LLMatcher(self._ll_tokenizer, text, log_level=0, limits=limits)
        if compiled.is_error():
            reason = compiled.get_error()
            # llguidance panics if a grammar has too many symbols.
            is_panic = reason.startswith("panic:")
            raise _refused(grammar, "it has too many rules" if is_panic else reason)
        for warning in compiled.get_grammar_warnings():
            logger.warning("%s: %s", grammar.name, warning)
        Matcher(compiled.deep_copy(), self._ends, grammar.name).check_begins()
        return compiled

    @cached_property
    def _ll_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UnsupportedModelError(
                f"The tokenizer of {self._name} is a {type(self._tokenizer).__name__}, but "
                "grammars require a tokenizer from the tokenizers library"
            )
        backend = copy.copy(backend)
        backend.no_padding()
        backend.no_truncation()
        try:
            return LLTokenizer(backend.to_str(), eos_token=self._ends or None)
        except ValueError as error:
            raise UnsupportedModelError(
                f"Grammars cannot be compiled for the tokenizer of {self._name}: {error}"
            ) from error


def _refused(grammar: Grammar, why: str) -> GrammarError:
    shown = why if len(why) <= 1000 else f"{why[:500]} ... {why[-500:]}"
    return GrammarError(
        f"{_capitalized(grammar.name)} cannot be compiled: {shown}. Remove or replace this part "
        "(docs/guides/structured_output.md)"
    )


def _capitalized(name: str) -> str:
    return name[:1].upper() + name[1:]


def _ll_grammar(grammar: Grammar) -> str:
    from llguidance import LLMatcher, StructTag, grammar_from

    if grammar.kind == "json" or grammar.kind == "json_object":
        schema = _checked_schema(json.loads(grammar.text))
        defaults: Any = {"whitespace_pattern": _WHITESPACE}
        return LLMatcher.grammar_from_json_schema(schema, defaults=defaults)
    if grammar.kind == "structural_tag":
        tags = json.loads(grammar.text)
        if not isinstance(tags, dict) or not {"triggers", "structures"} <= {*tags}:
            raise ValueError(
                "Expected structural_tag to be {'triggers': [...], 'structures': [{'begin': ..., "
                f"'schema': ..., 'end': ...}}]}}, found {grammar.text[:200]}"
            )
        structures = []
        for tag in tags["structures"]:
            begin, triggers = tag["begin"], tags["triggers"]
            if not (fitting := [trigger for trigger in triggers if begin.startswith(trigger)]):
                raise ValueError(
                    f"{begin!r} does not start with any of the triggers {', '.join(triggers)}"
                )
            schema, end = _checked_schema(tag["schema"]), tag["end"]
            structures.append(StructTag(trigger=fitting[0], begin=begin, grammar=schema, end=end))
        return StructTag.to_grammar(structures)
    if grammar.kind == "choice":
        return LLMatcher.grammar_from_lark(choice_grammar(json.loads(grammar.text)))
    text = grammar_from(grammar.kind, grammar.text)
    if grammar.kind == "grammar":
        check_lark(text)
    return text


def _checked_schema(schema: dict[str, Any]) -> dict[str, Any]:
    check_schema(schema)
    return prepared(schema)
