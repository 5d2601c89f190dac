"""A request's tools, and the parser for its answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockattn_rag.output.grammar import parse_grammar
from blockattn_rag.output.tool_formats import FORMATS, calls_grammar
from blockattn_rag.output.tool_parser import CallParser
from blockattn_rag.output.tool_templates import (
    ToolTemplate,
    shows_results,
    tool_template,
    without_tools,
)
from blockattn_rag.prompts.chat_template import Message, Spans, chat_spans, has_chat_template

AUTO, REQUIRED, NONE = "auto", "required", "none"

TOOL_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls", "tool_calls")
"""Names of the tool options of a request."""

_JSON_KINDS = ("json", "json_object")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of a request.

    Args:
        choice: ``"auto"``: the model may call tools. ``"required"``: it must call a tool. Any other
            string is the name of the tool that it must call. A grammar enforces required calls.
        parallel: Whether the model may make several calls at once.
        constrained: Whether a grammar separates text from calls, starting with the first token.
    """

    template: ToolTemplate
    tools: tuple[Mapping[str, Any], ...]
    choice: str
    parallel: bool
    constrained: bool

    @classmethod
    def of_call(
        cls, call: Mapping[str, Any], load_tokenizer: Callable[[], Any], model_name: str | None
    ) -> ToolUse | None:
        """Parse a request's tools. Returns None if no tool may be called.

        Args:
            call: Options of the request. ``tools``: definitions. ``tool_choice``: None, ``"auto"``,
                ``"none"``, ``"any"``, ``"required"``, a bool, a tool's name or ``{"type":
                "function", "function": {"name": ...}}``. ``parallel_tool_calls``: bool.
                ``tool_calls``: None, ``"free"`` or ``"constrained"``.
            load_tokenizer: Function that returns the tokenizer. Not called if the result is None.
        """
        tools, calls = call.get("tools") or (), call.get("tool_calls")
        _check_definitions(tools)
        choice = choice_of(call.get("tool_choice"), tools)
        if tools and calls not in (None, "free", "constrained"):
            raise ValueError(f"Invalid tool_calls {calls!r}: expected 'free' or 'constrained'")
        if not tools or choice == NONE:
            return None
        tokenizer = load_tokenizer()
        template = tool_template(tokenizer)
        if template is None and choice != AUTO and has_chat_template(tokenizer):
            # Required calls work with any template, because a grammar enforces their format.
            template = ToolTemplate(FORMATS["hermes"], variable=None)
        if template is None:
            raise ValueError(
                f"The chat template of {model_name or 'this model'} does not support tools, or "
                "uses an unknown format for calls (known: Hermes and Qwen, Llama 3, Mistral, "
                "Granite, SmolLM3). Use another model, set a chat_template that supports tools, "
                "require a call (tool_choice, with any chat template), or omit the tools: "
                "RetrieveFirst retrieves passages without tool calls (docs/guides/agents.md)"
            )
        return cls(
            template,
            tuple(tools),
            choice,
            parallel=call.get("parallel_tool_calls") is not False,
            constrained=calls == "constrained",
        )

    def engine_options(self, tokenizer: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        """Create the engine's options for a request with these tools.

        A grammar allows only calls if they are required, calls or JSON if JSON output is requested,
        and calls or text if ``constrained``. Otherwise, the options are unchanged. Another grammar
        raises ValueError if calls are required or constrained.
        """
        if not self._decides(options):
            return dict(options)
        grammar = parse_grammar(options.get("response_format"), options.get("structured_outputs"))
        if grammar is not None and grammar.kind not in _JSON_KINDS:
            raise ValueError(
                f"Found {grammar} with tools whose calls are required or constrained, but no "
                "answer can satisfy both: remove structured_outputs, or tool_choice and tool_calls"
            )
        may = self.tools
        if self.choice not in (AUTO, REQUIRED):
            may = tuple(tool for tool in may if tool["function"]["name"] == self.choice)
        calls = calls_grammar(
            self.template.form,
            may,
            tokenizer,
            several=self.parallel,
            answer=json.loads(grammar.text) if grammar and self.choice == AUTO else None,
            or_text=self.choice == AUTO,
        )
        return {**options, "response_format": None, "structured_outputs": {"grammar": calls}}

    def parser(self, tokenizer: Any, options: Mapping[str, Any]) -> CallParser:
        return CallParser(
            self.template.form,
            [tool["function"]["name"] for tool in self.tools],
            tokenizer,
            only_first=self._decides(options),
            parallel=self.parallel,
        )

    def _decides(self, options: Mapping[str, Any]) -> bool:
        """Whether a grammar separates calls from other output, starting with the first token."""
        if self.choice != AUTO or self.constrained:
            return True
        grammar = parse_grammar(options.get("response_format"), options.get("structured_outputs"))
        return grammar is not None and grammar.kind in _JSON_KINDS


def prompt_spans(
    tokenizer: Any, messages: Sequence[Message], tools: ToolUse | None, **variables: Any
) -> Spans:
    """Render messages that may contain calls and results; see ``ToolTemplate.spans``."""
    template = tools.template if tools else tool_template(tokenizer)
    if template is not None:
        return template.spans(tokenizer, messages, tools.tools if tools else (), **variables)
    shown = messages if shows_results(tokenizer) else without_tools(messages)
    return chat_spans(tokenizer, shown, **variables)


def choice_of(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str:
    """Normalize a tool choice to a value of ``ToolUse.choice``, or ``"none"``."""
    names = [tool["function"]["name"] for tool in tools]
    match choice:
        case {"function": {"name": str(name)}}:
            choice = name
        case {"name": str(name)} if "function" not in choice:
            choice = name
        case None | "auto":
            return AUTO
        case False | "none":
            return NONE
        case True | "any" | "required":
            if not tools:
                raise ValueError(f"tool_choice={choice!r} requires at least one tool, found none")
            return REQUIRED
    if isinstance(choice, str) and choice in names:
        return choice
    raise ValueError(
        f"Invalid tool_choice {choice!r}: expected 'auto', 'none', 'any', 'required', or the name "
        f"of a tool ({', '.join(names) or 'found none'})"
    )


def with_default_calls(defaults: Mapping[str, Any], call: Mapping[str, Any]) -> dict[str, Any]:
    """Add the model's default for ``tool_calls`` to a request's options."""
    options = {name: value for name, value in defaults.items() if name in TOOL_OPTIONS}
    if others := [name for name in options if name != "tool_calls"]:
        raise ValueError(
            f"Found {others[0]} in generate_kwargs, which accepts no tool options except "
            f"tool_calls: pass {others[0]} with each call, or bind it"
        )
    return {**options, **call}


def without_tool_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in TOOL_OPTIONS}


def _check_definitions(tools: Sequence[Any]) -> None:
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise TypeError(
                "A tool's definition must be {'type': 'function', 'function': {'name': ..., "
                f"'description': ..., 'parameters': ...}}}}; found {tool!r:.200}"
            )
