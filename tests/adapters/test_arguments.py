"""Every class that takes keyword arguments refuses unknown ones."""

from __future__ import annotations

from typing import Any

import pytest

from blockattn_rag.adapters.arguments import check_known
from tests.adapters.frameworks import EACH, Framework


class Thing:
    """Class named in the error messages."""


def test_unknown_arguments_raise_with_suggestions() -> None:
    known = ["temperature", "top_p", "generate_kwargs"]
    check_known(Thing, ["temperature"], known)
    with pytest.raises(TypeError) as raised:
        check_known(Thing, ["temprature", "zzz"], known)
    message = str(raised.value)
    assert message.startswith(
        "Thing has no argument 'temprature' (did you mean 'temperature'?), 'zzz'. "
    )
    assert "such as mode, recipe or do_sample, in generate_kwargs={...}" in message
    with pytest.raises(TypeError, match="did you mean 'model_name'"):
        check_known(Thing, ["model"], ["mode", "model_name"])
    with pytest.raises(TypeError, match=r"^Thing has no argument 'zzz'$"):
        check_known(Thing, ["zzz"], ["order"])


@pytest.mark.parametrize("name", ["temprature", "do_sample", "time_out"])
def test_constructors_refuse_unknown_arguments(name: str) -> None:
    from blockattn_rag.langchain import BlockKVTransformer, ChatBlockAttention
    from blockattn_rag.llama_index import BlockAttentionLLM

    arguments: dict[str, Any] = {name: 1}
    for cls in (ChatBlockAttention, BlockKVTransformer):
        with pytest.raises(TypeError, match=f"{cls.__name__} has no argument '{name}'"):
            cls(model="bundled", **arguments)
    with pytest.raises(TypeError, match=f"no argument '{name}'.*generate_kwargs"):
        BlockAttentionLLM(model_name="bundled", **arguments)


def test_aliases_of_arguments_are_accepted() -> None:
    from blockattn_rag.langchain import ChatBlockAttention

    chat = ChatBlockAttention(model="bundled", max_new_tokens=3, stop_sequences=["x"], tags=["a"])
    assert (chat.max_tokens, chat.stop, chat.tags) == (3, ["x"], ["a"])


@EACH
def test_objects_of_other_types_raise_type_error(framework: Framework) -> None:
    wrong: Any = "bundled"
    with pytest.raises(TypeError, match=r"\(\.\.\.\); found str 'bundled'\. Pass a model name as"):
        framework.ingestion(llm=wrong)
    step = framework.ingestion(model="bundled")
    ingest = getattr(step, "transform_documents", step)
    with pytest.raises(TypeError, match=r"Expected a list of \w+, found str 'a text' at index 0"):
        ingest(["a text"])
