"""BlockAttentionLLM: a local model for LangChain, for prompts that are strings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation as LangChainGeneration
from langchain_core.outputs import GenerationChunk as LangChainChunk
from langchain_core.outputs import LLMResult

from blockattn_rag.engine.results import Generation, GenerationChunk
from blockattn_rag.langchain.fields import GenerationFields
from blockattn_rag.langchain.messages import metadata_of
from blockattn_rag.prompts.blocks import BlockPrompt, Span


class BlockAttentionLLM(GenerationFields, BaseLLM):  # type: ignore[misc]
    """A local transformers model for string prompts; passages in them are marked as for chat.

    The prompt is taken as it stands: no chat template is applied. For the arguments see
    ``EngineFields`` and ``GenerationFields``. Several prompts of one ``generate`` or ``batch``
    share each forward of the model. The figures of an answer are in its ``generation_info``.

    ``parse_special_tokens=True``, of a call or of ``generate_kwargs``, parses control tokens of the
    model in the prompt, passages excepted: for prompt templates of your own that write them.
    Whatever else goes into such a prompt, a question too, can then write them as well.
    """

    prompt_options: ClassVar[tuple[str, ...]] = ("parse_special_tokens",)

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)

    @property
    def _llm_type(self) -> str:
        return "blockattn-rag"

    def to_prompt(self, prompt: str, *, parse_special_tokens: bool | None = None) -> BlockPrompt:
        """The blocks that a prompt becomes.

        Args:
            prompt: A string.
            parse_special_tokens: Whether control tokens are parsed in it. Default: as
                ``generate_kwargs`` says.
        """
        return BlockPrompt.from_spans(
            self._spans(prompt, parse_special_tokens), self.block_template
        )

    def _spans(self, prompt: str, parse_special_tokens: bool | None) -> list[Span]:
        if parse_special_tokens is None:
            parse_special_tokens = bool(self.generate_kwargs.get("parse_special_tokens", False))
        return self.source.string_spans(prompt, parse_special_tokens=parse_special_tokens)

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text without its markers and without BOS."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self.source.tokenizer.final_ids(self._spans(text, None), first=False)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        options = self.engine_options(stop, kwargs)
        blocks = [self._exchange(prompt, kwargs).prompt() for prompt in prompts]
        return self._result(self.engine.generate_batch(blocks, **options))

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        options = self.engine_options(stop, kwargs)
        exchanges = (self._exchange(prompt, kwargs) for prompt in prompts)
        calls = (self.source.agenerate(one.prompt, options) for one in exchanges)
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            return self._result(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # those beside one that failed
                task.cancel()

    def _exchange(self, given: Any, call: dict[str, Any]) -> _TextExchange:
        return _TextExchange(self, given, call.get("parse_special_tokens"))

    def _result(self, answers: Sequence[Generation]) -> LLMResult:
        usage = {
            "prompt_tokens": sum(answer.stats.prompt_tokens for answer in answers),
            "completion_tokens": sum(answer.stats.generated_tokens for answer in answers),
        }
        return LLMResult(
            generations=[
                [LangChainGeneration(text=a.text, generation_info=metadata_of(a, self.model_name))]
                for a in answers
            ],
            llm_output={"model_name": self.model_name, "token_usage": usage},
        )


class _TextExchange:
    """A call with a string."""

    def __init__(self, llm: BlockAttentionLLM, given: str, parses: bool | None) -> None:
        self._llm = llm
        self._given = given
        self._parses = parses

    def prompt(self) -> BlockPrompt:
        return self._llm.source.noted(
            self._llm.to_prompt(self._given, parse_special_tokens=self._parses)
        )

    def chunk(self, piece: GenerationChunk) -> LangChainChunk:
        answer = piece.generation
        info = metadata_of(answer, self._llm.model_name) if answer else None
        return LangChainChunk(text=piece.text, generation_info=info)
