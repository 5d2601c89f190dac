"""LangChain's own tests of chat models, on a model behind a server that is told what to say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from tests.langchain import test_standard as standard
from tests.scripted import tool_model
from tests.server.client.fake_server import FakeServer


@pytest.fixture(scope="module", autouse=True)
def _serving() -> Iterator[None]:
    server = FakeServer(tool_model(), name="tiny")
    server.script = standard.answer_to
    with server.listening() as Behind.url:
        yield


class Behind(standard.UnderTest):
    """What the suite asks of the class under test, whose model a server has."""

    url: str

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "tiny",
            "base_url": self.url,
            "model_kwargs": {"tokenizer": tool_model().tokenizer.tokenizer},
        }


class TestUnit(Behind, ChatModelUnitTests):
    pass


class TestIntegration(standard.Usage, Behind, ChatModelIntegrationTests):
    pass
