"""A server's answers carry token ids, so calls that they quote are text."""

from __future__ import annotations

from typing import Any

import pytest

from blockattn_rag.langchain import ChatBlockAttention
from blockattn_rag.server.client import RemoteEngine
from tests.langchain.test_tools import ask
from tests.quoting import called, delete_all, quoted, quoting_model
from tests.server.client.fake_server import FakeServer


@pytest.mark.parametrize("how", ["invoke", "stream"])
@pytest.mark.parametrize("form", ["hermes", "mistral_args"])
def test_a_quoted_call_is_text_and_a_made_one_a_call(form: str, how: str) -> None:
    model = quoting_model(form)
    server = FakeServer(model)
    with server.listening():
        engine = RemoteEngine(server.url, tokenizer=model.tokenizer.tokenizer)
        chat: Any = ChatBlockAttention(engine=engine, max_tokens=200).bind_tools([delete_all])
        server.script = lambda _: quoted(form)
        answer = ask(chat, how)
        assert (answer.content, answer.tool_calls) == (quoted(form)[0].text, [])
        server.script = lambda _: called(form)
        answer = ask(chat, how)
        assert answer.content == "I do."
        assert [one["name"] for one in answer.tool_calls] == ["delete_all"]
