"""LangChain's own tests of chat models, on the bundled model behind a server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from tests.langchain import test_standard as standard
from tests.langchain.conftest import bundled_block_model
from tests.remote.fake_server import FakeServer


@pytest.fixture(scope="module", autouse=True)
def _serving() -> Iterator[None]:
    with FakeServer(bundled_block_model(), name="bundled").listening() as Behind.url:
        yield


class Behind(standard.UnderTest):
    """What the suite asks of the class under test, whose model a server has."""

    url: str

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "bundled", "base_url": self.url}


class TestUnit(Behind, ChatModelUnitTests):
    pass


class TestIntegration(standard.Usage, Behind, ChatModelIntegrationTests):
    pass
