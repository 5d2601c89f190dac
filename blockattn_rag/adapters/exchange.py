"""Calls of framework adapters to a model, with ``ChatTurn`` as input and ``Step`` as output."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from blockattn_rag.adapters.sources import EngineSource
from blockattn_rag.engine.pending import Group
from blockattn_rag.engine.results import Generation, GenerationChunk
from blockattn_rag.output import CallParser, InvalidToolCall, ToolCall
from blockattn_rag.output.answers import ThoughtReader, has_no_thoughts
from blockattn_rag.output.tool_parser import AnswerReader
from blockattn_rag.output.tool_use import ToolUse, with_default_calls
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.chat_template import check_template_kwargs

Response = TypeVar("Response")


class Model(Protocol):
    """Attributes of a framework's model that a call requires."""

    @property
    def source(self) -> EngineSource: ...

    @property
    def model_name(self) -> str | None: ...

    @property
    def generate_kwargs(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """Chat message with the roles and fields of chat templates.

    Args:
        role: ``"system"``, ``"user"``, ``"assistant"``, ``"tool"``, or another template role.
        text: Text of the message, with block markers around passages.
        thoughts: Reasoning of an earlier answer. The template decides whether to include it.
        calls: Tool calls of an earlier answer.
        result_of: Id of the tool call whose result this message is, or None if it is not a result.
        tool: Name of the tool that returned the result. Default: the name in call ``result_of``.
    """

    role: str
    text: str
    thoughts: str = ""
    calls: Sequence[ToolCall] = ()
    result_of: str | None = None
    tool: str = ""


def template_messages(turns: Iterable[ChatTurn]) -> list[dict[str, Any]]:
    """Convert turns to chat-template messages. Tool results get the name of the called tool."""
    messages: list[dict[str, Any]] = []
    tools: dict[str, str] = {}  # Tool names by call id.
    for turn in turns:
        message: dict[str, Any] = {"role": turn.role, "content": turn.text}
        if turn.thoughts:
            message["reasoning_content"] = turn.thoughts
        if turn.calls:
            message["tool_calls"] = [call.to_dict() for call in turn.calls]
            tools |= {call.id: call.name for call in turn.calls}
        if turn.result_of is not None:
            name = turn.tool or tools.get(turn.result_of, "")
            message |= {"tool_call_id": turn.result_of, "name": name}
        messages.append(message)
    return messages


def tools_of(model: Model, call: Mapping[str, Any]) -> ToolUse | None:
    """Return the tools that a call may use, if any. Uses the model's default for ``tool_calls``."""
    options = with_default_calls(model.generate_kwargs, call)
    return ToolUse.of_call(options, lambda: model.source.tokenizer.tokenizer, model.model_name)


def template_variables(model: Model, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the chat template's variables: ``given``, with defaults from ``generate_kwargs``."""
    defaults = model.generate_kwargs.get("chat_template_kwargs") or {}
    tokenizer = model.source.tokenizer.tokenizer
    return check_template_kwargs(tokenizer, defaults) | check_template_kwargs(tokenizer, given)


@dataclass(frozen=True, slots=True)
class Step:
    """Complete answer, or the next piece of a stream. Only the last has calls and a generation."""

    thoughts: str
    text: str
    calls: Sequence[ToolCall] = ()
    invalid: Sequence[InvalidToolCall] = ()
    generation: Generation | None = None


class Exchange:
    """Call to a model. Splits the answer into thoughts, text and tool calls.

    Args:
        make_prompt: Function that creates the prompt. Async methods call it in another thread.
        options: Engine options, without tool options.
        tools: Tools that the model may call.
    """

    def __init__(
        self,
        source: EngineSource,
        make_prompt: Callable[[], BlockPrompt],
        options: dict[str, Any],
        tools: ToolUse | None,
    ) -> None:
        self._source = source
        self._make_prompt = make_prompt
        self.options = options
        self._parser: CallParser | None = None
        if tools is not None:
            tokenizer = source.tokenizer.tokenizer
            self._parser = tools.parser(tokenizer, options)
            self.options = tools.engine_options(tokenizer, options)

    def prompt(self) -> BlockPrompt:
        """Create the prompt and the reader of its answer. Passes the prompt to ``ReuseHints``."""
        prompt = self._make_prompt()
        at_once = has_no_thoughts(self.options)
        tokenizer = self._source.tokenizer.tokenizer
        thoughts = ThoughtReader(tokenizer, prompt, answers_at_once=at_once)
        self._reader = AnswerReader(thoughts, self._parser)
        if self._source.hints is not None:
            self._source.hints.look_at(prompt)
        return prompt

    @property
    def group_key(self) -> object:
        """Key that calls must share to be answered in one batch (``Group``)."""
        return self._source, self.options

    def answer(self) -> Step:
        """Generate the complete answer, in one batch with the other calls of its group, if any."""
        engine, prompt = self._source.engine, self.prompt()
        if (group := Group.of_this_call(self.group_key)) is None:
            return self._read(engine.generate(prompt, **self.options))
        return self._read(engine.submit(prompt, group=group, **self.options).result())

    async def aanswer(self) -> Step:
        """Async version of ``answer``. Another thread loads the model and creates the prompt."""
        engine = await self._source.loaded_engine()
        group = Group.of_this_call(self.group_key)
        return self._read(await engine.agenerate(self.prompt, group=group, **self.options))

    def stream(self, convert: Callable[[Step], Response]) -> Generator[Response, None, None]:
        """Yield the converted steps of the answer. Closing the generator stops the generation."""
        prompt = self.prompt()
        with closing(self._source.engine.stream(prompt, **self.options)) as chunks:
            for chunk in chunks:
                yield convert(self._read(chunk))

    async def astream(self, convert: Callable[[Step], Response]) -> AsyncGenerator[Response, None]:
        engine = await self._source.loaded_engine()
        async with aclosing(engine.astream(self.prompt, **self.options)) as chunks:
            async for chunk in chunks:
                yield convert(self._read(chunk))

    def _read(self, output: Generation | GenerationChunk) -> Step:
        generation = output if isinstance(output, Generation) else output.generation
        if generation is None:
            said = self._reader.push(output.text, output.token_ids)
            return Step(said.thoughts, said.answer)
        said, answer = self._reader.finish(generation.text, generation.token_ids)
        return Step(said.thoughts, said.answer, answer.calls, answer.invalid, generation)
