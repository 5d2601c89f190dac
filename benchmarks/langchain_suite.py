"""LangChain's integration tests for chat models, with a real model that can call tools.

Run: MODEL=path/to/model.gguf python -m pytest -p no:cacheprovider benchmarks/langchain_suite.py
"""

import os
from functools import cache
from typing import Any

from langchain_tests.integration_tests import ChatModelIntegrationTests

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.langchain import ChatBlockAttention


@cache
def engine() -> BlockAttentionEngine:
    return BlockAttentionEngine.from_pretrained(os.environ["MODEL"])


class TestIntegration(ChatModelIntegrationTests):
    chat_model_class = ChatBlockAttention
    supports_model_override = False
    has_tool_calling = has_tool_choice = True
    has_structured_output = supports_json_mode = True

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": engine()}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"temperature": 0, "max_tokens": 200, "stop": [], "timeout": 60, "max_retries": 2}
