"""What a chat model can do, as LangChain's ``profile`` tells it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from langchain_core.language_models.model_profile import ModelProfile

from blockattn_rag.adapters.engine_source import EngineSource
from blockattn_rag.output import tool_template
from blockattn_rag.output.thinking import marks_thoughts


class SourceProfile(Mapping[str, Any]):
    """The profile of a model, read from its config and tokenizer when it is first asked: a chat
    model is made without reading anything."""

    def __init__(self, source: EngineSource) -> None:
        self._source = source

    @cached_property
    def _known(self) -> ModelProfile:
        tokenizer = self._source.tokenizer.tokenizer
        calls_tools = tool_template(tokenizer) is not None
        holds = self._source.follows_grammars
        return ModelProfile(
            max_input_tokens=self._source.max_context_tokens,
            open_weights=True,
            text_inputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            text_outputs=True,
            image_outputs=False,
            audio_outputs=False,
            video_outputs=False,
            reasoning_output=marks_thoughts(tokenizer),
            tool_calling=calls_tools,
            tool_choice=calls_tools and holds,
            tool_call_streaming=calls_tools,
            structured_output=holds,
        )

    def __getitem__(self, name: str) -> Any:
        return self._known[name]  # type: ignore[literal-required]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def __bool__(self) -> bool:
        return True  # because counting would read the model's files

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)})"
