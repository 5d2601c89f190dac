"""LLM that calls a server, based on LlamaIndex's class for OpenAI-compatible servers."""

from __future__ import annotations

from typing import Any, ClassVar

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.prompts import BasePromptTemplate

from blockattn_rag.adapters.sources import ServerSource
from blockattn_rag.lazy import missing_extra
from blockattn_rag.llama_index.prompting import with_whole_passages
from blockattn_rag.model.loading import load_tokenizer
from blockattn_rag.prompts.blocks import BlockTemplate
from blockattn_rag.prompts.formats import BLANK_LINE
from blockattn_rag.prompts.markers import strip_markers
from blockattn_rag.prompts.tokenization import BlockTokenizer
from blockattn_rag.server import ServerClient

try:
    from llama_index.llms.openai_like import OpenAILike
except ModuleNotFoundError as error:
    needed = missing_extra("llama-index-llms-openai-like", "serving")
    raise ImportError(f"served_llm needs {needed}") from error


class ServedLLM(OpenAILike):
    """``OpenAILike`` that keeps passages complete. Create it with ``served_llm``."""

    block_template: ClassVar[BlockTemplate] = BLANK_LINE
    """Text around each passage. Servers support only this template."""

    _counting: BlockTokenizer | None = PrivateAttr(default=None)

    @classmethod
    def class_name(cls) -> str:
        return "ServedLLM"

    @property
    def source(self) -> ServerSource:
        """The server, for ingestion with ``BlockKVTransform(llm=...)``."""
        return ServerSource(str(self.api_base), self.api_key)

    def _token_counter(self) -> BlockTokenizer:
        if self._counting is None:
            name = self.model if self.tokenizer is None else self.tokenizer
            self._counting = BlockTokenizer(load_tokenizer(name) if isinstance(name, str) else name)
        return self._counting

    def tokenize(self, text: str) -> list[int]:
        """Tokenize a text without block markers and BOS, to count its tokens."""
        return self._token_counter().text_ids(strip_markers(text))

    def prompt_tokens(self, prompt: BasePromptTemplate, **variables: str) -> int:
        if not self.is_chat_model:
            text = strip_markers(self._get_prompt(prompt, **variables))
            return len(self._token_counter().final_ids(text, first=True))
        messages = self._get_messages(prompt, **variables)
        turns = [{"role": str(m.role.value), "content": m.content or ""} for m in messages]
        ids = self._token_counter().tokenizer.apply_chat_template(
            turns, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        return len(ids)

    def _get_prompt(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        return super()._get_prompt(prompt, **with_whole_passages(prompt_args))

    def _get_messages(self, prompt: BasePromptTemplate, **prompt_args: Any) -> list[ChatMessage]:
        return super()._get_messages(prompt, **with_whole_passages(prompt_args))


def served_llm(
    url: str,
    model: str | None = None,
    *,
    api_key: str | None = None,
    tokenizer: Any = None,
    **llm_fields: Any,
) -> ServedLLM:
    """Create an LLM for a server that reuses passages, such as ``blockattn-rag serve``.

    Works with ``configure``, ``block_query_engine``, ``BlockKVPostprocessor`` and
    ``BlockKVTransform(llm=...)``. A response's reuse report is in the field ``blockattn`` of
    ``raw``.

    Args:
        url: Address of the server, such as ``"http://gpu:8000"``.
        model: Name of the model on the server. Default: the server's first model.
        api_key: API key of the server. Default: the environment variable ``BLOCKATTN_RAG_API_KEY``.
        tokenizer: Tokenizer of the model, or its name or path, used to count tokens when passages
            are packed into the context window. Default: the tokenizer of ``model``.
        llm_fields: Additional fields of ``OpenAILike``. Defaults: ``temperature=0``,
            ``max_tokens=256``, and the server's context window.

    Raises:
        ServingError: The server is unreachable, lacks this package's connector, or has another
            marker key.
    """
    client = ServerClient(url, api_key)
    client.check_markers()
    defaults = {
        "context_window": client.info.max_tokens,
        "max_tokens": 256,
        "temperature": 0.0,
        "is_function_calling_model": True,
    }
    return ServedLLM(
        model=model or client.info.models[0],
        api_base=client.openai_url,
        api_key=client.openai.api_key,
        is_chat_model=client.info.has_chat_template,
        tokenizer=tokenizer,
        **{**defaults, **llm_fields},
    )
