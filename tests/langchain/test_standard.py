"""LangChain's own tests of chat models, on the bundled model."""

from __future__ import annotations

from typing import Any, Literal

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.langchain import ChatBlockAttention, format_blocks
from tests.langchain.conftest import bundled_block_model, passages

Detail = Literal[
    "audio_input", "audio_output", "reasoning_output", "cache_read_input", "cache_creation_input"
]


class UnderTest:
    """What the suite asks of the class under test."""

    chat_model_class = ChatBlockAttention
    supports_model_override = False

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": BlockAttentionEngine(bundled_block_model())}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        # Without "timeout" and "max_retries", which a local model has no use for and refuses.
        return {"temperature": 0, "max_tokens": 40, "stop": []}


class Usage:
    """The hooks by which the suite looks at the figures of cached tokens."""

    chat_model_params: dict[str, Any]

    @property
    def supported_usage_metadata_details(self) -> dict[Literal["invoke", "stream"], list[Detail]]:
        cached: list[Detail] = ["cache_read_input", "cache_creation_input"]
        return {"invoke": cached, "stream": cached}

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        return self._ask(self._new_model(), stream)

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = self._new_model()
        self._ask(model, stream)
        message = self._ask(model, stream)
        assert message.usage_metadata is not None
        assert message.usage_metadata["input_token_details"]["cache_read"] > 0
        return message

    def _new_model(self) -> BaseChatModel:
        return ChatBlockAttention(max_tokens=5, **self.chat_model_params)

    @staticmethod
    def _ask(model: BaseChatModel, stream: bool) -> AIMessage:
        messages = [("system", format_blocks(passages())), ("human", "Which?")]
        if not stream:
            return model.invoke(messages)
        whole = AIMessageChunk(content="")
        for chunk in model.stream(messages):
            whole += chunk
        return whole


class TestUnit(UnderTest, ChatModelUnitTests):
    pass


class TestIntegration(Usage, UnderTest, ChatModelIntegrationTests):
    pass
