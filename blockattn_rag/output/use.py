"""The tools of one call of a model: what may be called, and how an answer is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockattn_rag.output.call_grammar import calls_grammar
from blockattn_rag.output.calls import ToolCall
from blockattn_rag.output.formats import HERMES, ToolFormat
from blockattn_rag.output.grammar import Grammar, parse_grammar
from blockattn_rag.output.history import without_tools
from blockattn_rag.output.marks import Marks, mark_ids
from blockattn_rag.output.parser import Piece, ToolCallParser
from blockattn_rag.output.templates import ToolTemplate, shows_results, tool_template
from blockattn_rag.output.told import ToldTools
from blockattn_rag.prompts.chat_template import Message, Spans, chat_spans, has_chat_template

AUTO, REQUIRED, NONE = "auto", "required", "none"

FREE, CONSTRAINED = "free", "constrained"

_CALLS = "tool_calls"

TOOL_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls", _CALLS)
"""Options of a call, in the order in which ``ToolUse.of`` takes them."""

_CHOICES: dict[object, str] = {
    None: AUTO,
    AUTO: AUTO,
    NONE: NONE,
    False: NONE,
    REQUIRED: REQUIRED,
    "any": REQUIRED,
    True: REQUIRED,
}


def known_tools(tokenizer: Any, model_name: str | None, choice: str = AUTO) -> ToolTemplate:
    """What a model's chat template does with tools. Where it knows none and a call is required,
    the tools are told in words, and the grammar does the rest.

    Args:
        choice: as ``ToolUse`` has it.

    Raises:
        ValueError: it knows no tools, or writes calls in a form that is not known here, and the
            model is free to call none.
    """
    if (found := tool_template(tokenizer)) is not None:
        return found
    if choice != AUTO and has_chat_template(tokenizer):
        return ToldTools(HERMES)
    raise ValueError(
        f"the chat template of {model_name or 'this model'} knows no tools, or writes calls in "
        "none of the forms that are read here (Hermes and Qwen, Llama 3, Mistral, Granite, "
        "SmolLM3). Take a model whose template does, give the tokenizer a chat_template that "
        "does, require a call (tool_choice), or leave the tools out: RetrieveFirst looks passages "
        "up without the model's help (docs/guides/agents.md)"
    )


def prompt_spans(
    tokenizer: Any, messages: Sequence[Message], tools: ToolUse | None, **variables: Any
) -> Spans:
    """The prompt that messages become, with calls and results in it or not; see ``chat_spans``.

    Args:
        messages: as ``ToolTemplate.spans`` takes them.
        tools: that may be called now.
        variables: further ones of the chat template.
    """
    if tools is not None:
        return tools.spans(tokenizer, messages, **variables)
    if (template := tool_template(tokenizer)) is not None:
        return template.spans(tokenizer, messages, (), **variables)
    known = shows_results(tokenizer)
    return chat_spans(tokenizer, messages if known else without_tools(messages), **variables)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one call.

    Args:
        template: what the model's chat template does with tools.
        tools: their definitions, as ``ToolTemplate.spans`` takes them.
        choice: ``"auto"``: the model may call any or none; ``"required"``: it must call one; or the
            name of the one that it must call. Where it must, a grammar holds it to valid arguments.
        parallel: whether it may make several calls at once.
        constrained: whether a grammar decides between text and calls, from the first token on.
        tokens: marks of calls that the tokenizer has as one token each; no other characters are
            such a mark.
    """

    template: ToolTemplate
    tools: tuple[Mapping[str, Any], ...]
    choice: str = AUTO
    parallel: bool = True
    constrained: bool = False
    tokens: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        model_name: str | None,
        tools: Sequence[Mapping[str, Any]] | None,
        choice: Any = None,
        parallel: bool | None = None,
        calls: str | None = None,
    ) -> ToolUse | None:
        """The tools of a call with these options; None if no tool may be called.

        Args:
            choice: None, ``"auto"``, ``"none"``, ``"any"`` or ``"required"``, a bool, a tool's
                name, or ``{"type": "function", "function": {"name": ...}}``.
            calls: None, ``"free"`` or ``"constrained"``; see ``constrained`` of the class.

        Raises:
            ValueError: the model's template knows no tools, or ``choice`` or ``calls`` is none of
                these.
            TypeError: a definition is none.
        """
        _check_definitions(tools or ())
        wanted = choice_of(choice, tools or ())
        if calls not in (None, FREE, CONSTRAINED):
            raise ValueError(f"tool_calls must be {FREE!r} or {CONSTRAINED!r}; found {calls!r}")
        if not tools or wanted == NONE:
            return None
        template = known_tools(tokenizer, model_name, wanted)
        tokens = frozenset(mark_ids(template.form, tokenizer))
        is_constrained = calls == CONSTRAINED
        return cls(template, tuple(tools), wanted, parallel is not False, is_constrained, tokens)

    @classmethod
    def of_call(
        cls, call: Mapping[str, Any], load_tokenizer: Callable[[], Any], model_name: str | None
    ) -> ToolUse | None:
        """``of`` the options of a call, by their names in ``TOOL_OPTIONS``.

        Args:
            load_tokenizer: gives the tokenizer; a call without tools does not need it.
        """
        given = [call.get(name) for name in TOOL_OPTIONS]
        return cls.of(load_tokenizer(), model_name, *given) if any(given[:2]) else None

    @property
    def names(self) -> list[str]:
        """The names of the tools."""
        return [tool["function"]["name"] for tool in self.tools]

    def spans(self, tokenizer: Any, messages: Sequence[Message], **variables: Any) -> Spans:
        """The prompt that messages become; see ``ToolTemplate.spans``."""
        return self.template.spans(tokenizer, messages, self.tools, **variables)

    def engine_options(self, tokenizer: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """Options of the engine by which calls can be read, and are made where they must be.

        Where the model may call tools and its answer is to be JSON, it does one of the two. Where
        it must call one, the answer is nothing else. Grammars of the user's own stay as they are.

        Args:
            given: options of the call.

        Raises:
            ValueError: a grammar of the user's own leaves no room for one that decides about calls.
        """
        form, may = self.template.form, self.tools
        options = {**given, "keep_tokens": form.marks, "calls": self._reading(given)}
        if not self._decides(given):
            return options
        held = _grammar_of(given)
        if held is not None and not _is_json(held):
            raise ValueError(
                f"found {held} beside tools of which one must be called, or whose calls are "
                "constrained, and an answer cannot be both; leave out structured_outputs, or "
                "tool_choice and tool_calls"
            )
        answer = json.loads(held.text) if held is not None and self.choice == AUTO else None
        if self.choice not in (AUTO, REQUIRED):
            may = tuple(tool for tool in may if tool["function"]["name"] == self.choice)
        grammar = calls_grammar(
            form,
            may,
            tokenizer,
            several=self.parallel,
            answer=answer,
            or_text=self.choice == AUTO,
        )
        return {**options, "response_format": None, "structured_outputs": {"grammar": grammar}}

    def reader(self, given: Mapping[str, Any]) -> AnswerReader:
        """Reads one answer.

        Args:
            given: options of the call, as for ``engine_options``.
        """
        return self._reading(given).reader()

    def _reading(self, given: Mapping[str, Any]) -> CallReading:
        form, names, only_first = self.template.form, tuple(self.names), self._decides(given)
        return CallReading(form, names, self.tokens, only_first, self.parallel)

    def _decides(self, given: Mapping[str, Any]) -> bool:
        """Whether a grammar decides between calls and anything else, from the first token on."""
        if self.choice != AUTO or self.constrained:
            return True
        held = _grammar_of(given)
        return held is not None and _is_json(held)


@dataclass(frozen=True, slots=True)
class CallReading:
    """How the calls of an answer are read; see ``ToolCallParser`` and ``AnswerReader``."""

    form: ToolFormat
    names: tuple[str, ...]
    tokens: frozenset[str]
    only_first: bool
    parallel: bool

    def reader(self) -> AnswerReader:
        """Reads one answer."""
        parser = ToolCallParser(self.form, self.names, self.tokens, only_first=self.only_first)
        return AnswerReader(parser, self.parallel)


class AnswerReader:
    """Reads an answer of a model that has tools, piece by piece; see ``ToolCallParser``.

    A call with the name and the arguments of the one right before it ends the answer, and so does
    the first call where one is allowed. What comes after that is dropped.

    Args:
        parallel: whether several calls may be made.

    Attributes:
        has_loop: Whether the same call, valid or not, came twice in a row.
    """

    def __init__(self, parser: ToolCallParser, parallel: bool) -> None:
        self._parser = parser
        self._parallel = parallel
        self._is_done = False
        self._last = ""  # the latest call, as text
        self.has_loop = False

    @property
    def is_over(self) -> bool:
        """Whether the answer ends here."""
        return self._is_done or self.has_loop

    def read(self, text: str, marks: Marks = (), *, last: bool) -> list[Piece]:
        """Take the next piece of the answer, maybe the last; give what has become certain.

        Args:
            text: the piece.
            marks: where control tokens are in it.
            last: whether no more comes.
        """
        pieces = self._parser.push(text, marks)
        pieces += self._parser.finish() if last else ()
        given: list[Piece] = []
        for piece in pieces:
            if not self._is_done:
                self._take(piece, given)
        self.has_loop |= self._parser.has_loop
        return given

    def _take(self, piece: Piece, given: list[Piece]) -> None:
        """Add a piece to the others, unless it is the same call as the one right before it."""
        if isinstance(piece, str):
            given.append(piece)
            self._last = "" if piece.strip() else self._last
            return
        said = piece.arguments if isinstance(piece, ToolCall) else piece.text
        call = json.dumps([piece.name, said], sort_keys=True)
        if call == self._last:
            self.has_loop = self._is_done = True
            return
        given.append(piece)
        self._last = call
        self._is_done = isinstance(piece, ToolCall) and not self._parallel


def with_default_calls(defaults: Mapping[str, Any], call: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a call, with ``tool_calls`` as a model's defaults have it where it is missing.

    Raises:
        ValueError: the defaults have other options of tools.
    """
    given = {name: value for name, value in defaults.items() if name in TOOL_OPTIONS}
    if others := [name for name in given if name != _CALLS]:
        raise ValueError(
            f"found {others[0]} in generate_kwargs, expected {_CALLS} alone of the options of "
            "tools; pass it with each call, or bind it"
        )
    return {**given, **call}


def without_tool_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a call that are not about tools."""
    return {name: value for name, value in given.items() if name not in TOOL_OPTIONS}


def _grammar_of(given: Mapping[str, Any]) -> Grammar | None:
    return parse_grammar(given.get("response_format"), given.get("structured_outputs"))


def _is_json(grammar: Grammar) -> bool:
    return grammar.kind in ("json", "json_object")


def choice_of(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str:
    """A tool choice as ``ToolUse`` has it, or ``"none"``.

    Raises:
        ValueError: it is none of the known forms, or names no tool.
    """
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        named = function.get("name") if isinstance(function, Mapping) else None
        if named in names:
            return str(named)
        choice = named if isinstance(named, str) else choice
    elif isinstance(choice, (str, bool, type(None))):
        if choice in _CHOICES:
            wanted = _CHOICES[choice]
            if wanted == REQUIRED and not tools:
                raise ValueError(f"tool_choice={choice!r} needs a tool, found none")
            return wanted
        if choice in names:
            return str(choice)
    raise ValueError(
        f"tool_choice must be 'auto', 'none', 'any', 'required', or the name of a tool "
        f"({', '.join(names)}); found {choice!r}"
    )


def _check_definitions(tools: Sequence[Any]) -> None:
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise TypeError(
                "a tool's definition must be {'type': 'function', 'function': {'name': ..., "
                f"'description': ..., 'parameters': ...}}}}; found {tool!r:.200}"
            )
