"""BlockAttentionLLM: an LLM for LangChain that completes prompt strings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation as LangChainGeneration
from langchain_core.outputs import GenerationChunk as LangChainChunk
from langchain_core.outputs import LLMResult

from blockattn_rag.adapters.exchange import Exchange, Step
from blockattn_rag.engine.results import Generation
from blockattn_rag.langchain.fields import GenerationFields
from blockattn_rag.langchain.messages import metadata_of
from blockattn_rag.prompts.blocks import BlockPrompt, Span


class BlockAttentionLLM(GenerationFields, BaseLLM):  # type: ignore[misc]
    """A transformers model that completes prompt strings and reuses their marked passages.

    Applies no chat template. For the arguments see ``EngineFields`` and ``GenerationFields``. The
    prompts of one ``generate`` or ``batch`` call share each forward pass of the model. An answer's
    ``generation_info`` reports what was reused.

    ``parse_special_tokens=True``, in a call or in ``generate_kwargs``, parses control tokens in the
    prompt, outside of passages. It is for prompt templates that contain control tokens. Control
    tokens in a user's question are then parsed too.
    """

    prompt_options: ClassVar[tuple[str, ...]] = ("parse_special_tokens",)

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.source.load()

    @property
    def _llm_type(self) -> str:
        return "blockattn-rag"

    def to_prompt(self, prompt: str, *, parse_special_tokens: bool | None = None) -> BlockPrompt:
        """Convert a prompt to blocks.

        Args:
            prompt: Prompt with block markers around passages.
            parse_special_tokens: Whether to parse control tokens in the prompt. Default: the value
                in ``generate_kwargs``, or False.
        """
        spans = self._spans(prompt, parse_special_tokens)
        return self.source.prompt_of(spans, self.block_template, recognize=self.recognize)

    def _spans(self, prompt: str, parse_special_tokens: bool | None) -> list[Span]:
        if parse_special_tokens is None:
            parse_special_tokens = bool(self.generate_kwargs.get("parse_special_tokens", False))
        return self.source.string_spans(prompt, parse_special_tokens=parse_special_tokens)

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text, without block markers and BOS."""
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
        exchanges = [self._exchange(prompt, stop, kwargs) for prompt in prompts]
        blocks = [exchange.prompt() for exchange in exchanges]
        options = self.engine_options(stop, kwargs)
        return self._result(self.engine.generate_batch(blocks, **options))

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        calls = (self._exchange(prompt, stop, kwargs).aanswer() for prompt in prompts)
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            steps = await asyncio.gather(*tasks)
            return self._result([step.generation for step in steps if step.generation])
        finally:
            for task in tasks:  # if one failed, cancels the others
                task.cancel()

    def _exchange(self, given: Any, stop: list[str] | None, call: dict[str, Any]) -> Exchange:
        parses = call.get("parse_special_tokens")
        make_prompt = partial(self.to_prompt, given, parse_special_tokens=parses)
        return Exchange(self.source, make_prompt, self.engine_options(stop, call))

    def _chunk(self, step: Step) -> LangChainChunk:
        info = metadata_of(step.generation, self.model_name) if step.generation else None
        return LangChainChunk(text=step.output.text, generation_info=info)

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
