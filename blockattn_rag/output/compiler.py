"""Compiles grammars for a tokenizer, with llguidance.

llguidance has no dependencies, compiles JSON schemas, regular expressions and Lark grammars, and
refuses constraints that it cannot enforce.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from blockattn_rag.errors import GrammarError, UnsupportedModelError
from blockattn_rag.lazy import missing_extra
from blockattn_rag.output.grammar import Grammar, choice_grammar
from blockattn_rag.output.schema import prepared

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

logger = logging.getLogger("blockattn_rag")

MOST_COMPILED = 64
"""Maximum number of compiled grammars in the cache. Most take about 100 KiB each."""

MOST_ALTERNATIVES = 10_000
"""Maximum number of parser items per position: one per ``anyOf`` case or tool, four per optional
property. At this limit, a token takes up to 150 ms. llguidance's default is 2,000."""

_STACK_BYTES = 256 << 20
"""Stack size of compiler threads. llguidance follows references recursively: about 1,000 in a row
overflow the usual 8 MiB and crash the process. This size is enough for ``MOST_SCHEMAS`` references.
The system allocates stack pages on use."""

# At most one space: small models may repeat optional white space until the answer is cut off.
_WHITESPACE = " ?"


class Matcher:
    """Tracks one answer and computes which tokens may come next.

    Args:
        compiled: Compiled grammar. The matcher works on a copy.
        own_ends: Ids of the tokens that llguidance uses to end an answer.
        name: Name of the grammar in messages.
    """

    def __init__(self, compiled: LLMatcher, own_ends: Sequence[int], name: str) -> None:
        self._compiled = compiled
        self._name = name
        self._matcher = compiled.deep_copy()
        self._own_ends = list(own_ends)
        self._ids: list[int] = []

    def fresh(self) -> Matcher:
        """Create a matcher for a new answer."""
        return Matcher(self._compiled, self._own_ends, self._name)

    def follow(self, ids: Sequence[int]) -> bool:
        """Consume the answer so far. Returns whether all of it fits the grammar.

        Args:
            ids: All tokens of the answer. They may differ from those of the previous call.

        Raises:
            GrammarError: the grammar is too complex to check the tokens at this position.
        """
        same = next(
            (at for at, (a, b) in enumerate(zip(self._ids, ids, strict=False)) if a != b),
            min(len(self._ids), len(ids)),
        )
        back = len(self._ids) - same
        if back and not self._matcher.rollback(back):
            self._matcher = self._compiled.deep_copy()
            same = 0
        taken = self._matcher.try_consume_tokens(list(ids[same:]))
        self._check()
        self._ids = list(ids[: same + taken])
        return same + taken == len(ids)

    def is_complete(self) -> bool:
        """Whether the answer so far is complete. More tokens may still be allowed."""
        return bool(self._matcher.is_accepting())

    def allowed(self, vocabulary: int, ends: Collection[int]) -> NDArray[np.bool_]:
        """Which tokens may come next: bool ``[vocabulary]``.

        Args:
            vocabulary: Number of tokens that the model predicts.
            ends: Ids of the tokens that end the answer. They are allowed when it is complete.

        Raises:
            GrammarError: the grammar is too complex at this position.
        """
        known = self._next()[:vocabulary]
        allowed = np.zeros(vocabulary, bool)
        allowed[: len(known)] = known
        allowed[self._own_ends] = False
        allowed[list(ends)] = self.is_complete()
        return allowed

    def check_begins(self) -> None:
        """Try the first token of an answer, where most grammars that are too large fail.

        Raises:
            GrammarError: the grammar is too large, or no answer fits it.
        """
        self._matcher.try_consume_tokens(np.flatnonzero(self._next())[:1].tolist())
        self._check()

    def _next(self) -> NDArray[np.uint8]:
        """llguidance's mask of the next token: 1 if the token is allowed."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, bitorder="little")

    def _check(self) -> None:
        # llguidance does not raise: a matcher with an error accepts no token and allows the end.
        if self._matcher.is_error():
            found = self._matcher.get_error().partition("\n")[0]
            raise GrammarError(
                f"{self._name} cannot be followed: {found}. It is too large or too complex, or no "
                "answer fits it (for example, a schema that only refers to itself). Use fewer "
                "anyOf cases, tools or optional properties"
            )


class GrammarCompiler:
    """Compiles grammars for one tokenizer and caches them. Thread-safe.

    Each grammar is compiled once, in its own thread, so a slow grammar delays neither the model nor
    other grammars.

    Args:
        tokenizer: Transformers tokenizer.
        ends: Ids of the tokens that end an answer.
        name: Name of the model in messages.
    """

    def __init__(self, tokenizer: Any, ends: Collection[int], name: str) -> None:
        self._tokenizer = tokenizer
        self._ends = sorted(ends)
        self._name = name
        self._known: LLTokenizer | None = None
        self.renew()
        _compilers.add(self)

    def renew(self) -> None:
        """Drop the cache and running compilations: a forked process lacks their threads."""
        self._lock = threading.Lock()
        self._known_lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, Future[Matcher | str]] = OrderedDict()

    def start(self, grammar: Grammar) -> Future[Matcher | str]:
        """Compile a grammar in the background, unless it is cached or being compiled.

        Returns:
            Future of the compiled grammar, or of the reason why it cannot be compiled.
        """
        with self._lock:
            if (found := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return found
            compiled = self._compiled[grammar] = Future()
            if len(self._compiled) > MOST_COMPILED:
                self._compiled.popitem(last=False)
        try:
            work = threading.Thread(
                target=self._fill, args=(grammar, compiled), name="blockattn-grammar", daemon=True
            )
            with _stack_lock:  # the size applies to all threads that start now
                before = threading.stack_size(_STACK_BYTES)
                try:
                    work.start()
                finally:
                    threading.stack_size(before)
        except RuntimeError:  # no thread can be started
            self._fill(grammar, compiled)
        return compiled

    def matcher(self, grammar: Grammar) -> Matcher:
        """Create a matcher for a new answer. Waits until the grammar is compiled.

        Raises:
            GrammarError: The grammar cannot be compiled.
            UnsupportedModelError: The kind of tokenizer is not supported.
            ImportError: llguidance is missing.
        """
        compiled = self.start(grammar).result()
        if isinstance(compiled, str):  # a new error each time, because tracebacks keep frames alive
            raise GrammarError(compiled)
        return compiled.fresh()

    def _fill(self, grammar: Grammar, compiled: Future[Matcher | str]) -> None:
        try:
            compiled.set_result(self._compile(grammar))
        except GrammarError as error:
            compiled.set_result(str(error))
        except BaseException as error:  # noqa: BLE001 -- raised again by `matcher`
            with self._lock:  # the next call tries again
                if self._compiled.get(grammar) is compiled:
                    del self._compiled[grammar]
            compiled.set_exception(error)

    def _compile(self, grammar: Grammar) -> Matcher:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            needed = missing_extra("llguidance", "structured")
            raise ImportError(f"Structured output needs {needed}") from error
        with self._known_lock:
            if self._known is None:
                self._known = _ll_tokenizer(self._tokenizer, self._ends, self._name)
        try:
            text = _ll_grammar(grammar)
        except RecursionError:
            raise _refused(grammar, "it is nested too deeply") from None
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise _refused(grammar, str(error)) from error
        compiled = LLMatcher(self._known, text, log_level=0, limits=_limits())
        if compiled.is_error():
            found = compiled.get_error()
            is_panic = found.startswith("panic:")  # an assertion about the number of symbols
            raise _refused(grammar, "it has too many rules" if is_panic else found)
        for warning in compiled.get_grammar_warnings():
            logger.warning("%s: %s", grammar.name, warning)
        matcher = Matcher(compiled, self._ends, grammar.name)
        matcher.fresh().check_begins()
        return matcher


_compilers: WeakSet[GrammarCompiler] = WeakSet()
_stack_lock = threading.Lock()


def _renew_in_child() -> None:
    global _stack_lock
    _stack_lock = threading.Lock()
    for compiler in list(_compilers):
        compiler.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_in_child)


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    # Verbose errors quote the grammar and the answer, which do not belong in logs.
    return LLParserLimits(max_items_in_row=MOST_ALTERNATIVES, verbose_errors=False)


def _refused(grammar: Grammar, why: str) -> GrammarError:
    shown = why if len(why) <= 1000 else f"{why[:1000]}..."
    return GrammarError(
        f"{grammar.name} cannot be compiled: {shown}. Remove or replace this part "
        "(docs/guides/structured_output.md)"
    )


def _ll_tokenizer(tokenizer: Any, ends: Sequence[int], name: str) -> LLTokenizer:
    from llguidance import LLTokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModelError(
            f"The tokenizer of {name} is a {type(tokenizer).__name__}; grammars need one of the "
            "tokenizers library"
        )
    backend = copy.copy(backend)
    backend.no_padding()
    backend.no_truncation()
    try:
        return LLTokenizer(backend.to_str(), eos_token=list(ends) or None)
    except ValueError as error:
        raise UnsupportedModelError(
            f"Grammars cannot be compiled for the tokenizer of {name}: {error}"
        ) from error


def _ll_grammar(grammar: Grammar) -> str:
    """The grammar in llguidance's own format."""
    from llguidance import LLMatcher, StructTag, grammar_from

    if grammar.kind == "json" or grammar.kind == "json_object":
        schema = prepared(json.loads(grammar.text))
        defaults: Any = {"whitespace_pattern": _WHITESPACE}
        return LLMatcher.grammar_from_json_schema(schema, defaults=defaults)
    if grammar.kind == "structural_tag":
        given = json.loads(grammar.text)
        if not isinstance(given, dict) or not {"triggers", "structures"} <= {*given}:
            raise ValueError(
                "Expected {'triggers': [...], 'structures': [{'begin': ..., 'schema': ..., "
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
    if grammar.kind == "choice":
        return LLMatcher.grammar_from_lark(choice_grammar(json.loads(grammar.text)))
    return grammar_from(grammar.kind, grammar.text)


def _trigger(begin: str, triggers: Sequence[str]) -> str:
    for trigger in triggers:
        if begin.startswith(trigger):
            return trigger
    raise ValueError(f"{begin!r} starts with none of the triggers {', '.join(triggers)}")
