"""LangChain's standard tests of chat models, with a scripted model that calls tools."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from blockattn_rag.langchain import ChatBlockAttention, format_blocks
from tests.langchain.conftest import passages
from tests.scripted import ScriptedEngine, call_of

Detail = Literal[
    "audio_input", "audio_output", "reasoning_output", "cache_read_input", "cache_creation_input"
]


# Text of the request: the tool that the model calls, and its arguments.
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "magic_function(3)": ("magic_function", {"input": 3}),
    "magic_function_no_args()": ("magic_function_no_args", {}),
    "Hello!": ("magic_function", {"input": 1}),
    "weather in San Francisco": ("get_weather", {"location": "San Francisco, CA"}),
    "Pirate greeting": ("greeting_generator", {"answer_style": "pirate"}),
    "Create a customer": ("unicode_customer", {"customer_name": "QUOTED", "description": "New."}),
}


def answer_to(prompt: str) -> str:
    """Script of a model that calls the requested tool once, and otherwise gives a short answer."""
    question = prompt.rpartition("<|user|>\n")[2]
    if "joke" in question.lower():
        named = re.search(r'"name": "(\w*[jJ]oke\w*)"', prompt)
        joke = {"setup": "Why?", "punchline": "Because."}
        return call_of(named[1], joke) if named else json.dumps(joke)
    for asked, (name, arguments) in ASKED.items():
        if asked in question and f'"name": "{name}"' in prompt:
            quoted = question.partition("'")[2].partition("'")[0]
            arguments = {k: quoted if v == "QUOTED" else v for k, v in arguments.items()}
            return call_of(name, arguments)
    return "Very well."


class UnderTest:
    """Properties that the suite requires of the tested class."""

    chat_model_class = ChatBlockAttention
    supports_model_override = False
    has_tool_calling = has_tool_choice = True
    has_structured_output = supports_json_mode = True

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": ScriptedEngine(answer_to)}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        # The defaults of the suite, with enough tokens for an answer.
        return {"temperature": 0, "max_tokens": 200, "stop": [], "timeout": 60, "max_retries": 2}


class Usage:
    """Hooks with which the suite checks the counts of cached tokens."""

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
