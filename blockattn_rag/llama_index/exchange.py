"""One call of the LLM: the prompt that it becomes, and its answer as LlamaIndex's types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llama_index.core.base.llms.types import CompletionResponse
from llama_index_instrumentation import get_dispatcher

from blockattn_rag.adapters.engine_source import EngineSource
from blockattn_rag.engine.results import Generation, GenerationChunk, Marks, marks_at_end
from blockattn_rag.llama_index.events import BlockReuseEvent, usage_of
from blockattn_rag.output.thinking import Said, ThoughtReader, has_no_thoughts
from blockattn_rag.prompts.blocks import BlockPrompt

dispatcher = get_dispatcher(__name__)


class Exchange:
    """A call of the LLM. Thoughts of the model stand beside its answer, as ``thinking`` and
    ``thinking_delta`` of the response's ``additional_kwargs``.

    Args:
        source: where the model comes from.
        make_prompt: makes the call's prompt.
        options: of the engine.
    """

    def __init__(
        self,
        source: EngineSource,
        make_prompt: Callable[[], BlockPrompt],
        options: dict[str, Any],
    ) -> None:
        self._source = source
        self._make_prompt = make_prompt
        self.options = options
        self._thoughts = self._answer = ""
        self.marks: Marks = ()
        """Where control tokens are in the answer's latest piece."""

    def prompt(self) -> BlockPrompt:
        """The blocks of the prompt, which is about to be answered."""
        prompt = self._make_prompt()
        at_once = has_no_thoughts(self.options)
        tokenizer = self._source.tokenizer.tokenizer
        self._reader = ThoughtReader(tokenizer, prompt, answers_at_once=at_once)
        return self._source.noted(prompt)

    def whole(self, generation: Generation) -> CompletionResponse:
        """A whole answer."""
        said = self._reader.finish(generation.text)
        self.marks = marks_at_end(generation, said.answer)
        return self._finished(generation, said, None)

    def step(self, chunk: GenerationChunk) -> CompletionResponse:
        """One step of a stream."""
        is_last = chunk.generation is not None
        said = self._reader.finish(chunk.text) if is_last else self._reader.push(chunk.text)
        self.marks = marks_at_end(chunk, said.answer)
        if chunk.generation is not None:
            return self._finished(chunk.generation, said, said.answer)
        return self._response(said, delta=said.answer)

    def _finished(
        self, generation: Generation, said: Said, delta: str | None
    ) -> CompletionResponse:
        dispatcher.event(BlockReuseEvent(stats=generation.stats))
        raw = {"usage": usage_of(generation), "finish_reason": generation.finish_reason}
        return self._response(said, delta=delta, raw=raw)

    def _response(self, said: Said, **fields: Any) -> CompletionResponse:
        self._thoughts += said.thoughts
        self._answer += said.answer
        thinking = {"thinking": self._thoughts, "thinking_delta": said.thoughts or None}
        extra = thinking if self._thoughts else {}
        return CompletionResponse(text=self._answer, additional_kwargs=extra, **fields)
