from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.runnables import ConfigurableField

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.langchain import ChatBlockAttention, format_blocks
from blockattn_rag.model import BlockModel
from blockattn_rag.store import DirectoryStore
from tests.langchain.conftest import passages, tiny_block_model, whole
from tests.models import tiny_model, tiny_tokenizer
from tests.recipes import recipe_of

Messages = list[tuple[str, str]]


def asking(question: str = "Which?", count: int = 3) -> Messages:
    return [("system", "Context:\n" + format_blocks(passages(count))), ("human", question)]


async def test_all_methods_give_the_same_answer(chat: ChatBlockAttention) -> None:
    expected = chat.invoke(asking()).content
    assert expected
    assert whole(list(chat.stream(asking()))).content == expected
    assert whole([chunk async for chunk in chat.astream(asking())]).content == expected
    assert (await chat.ainvoke(asking())).content == expected
    assert chat.invoke(asking(), mode="full").usage_metadata["input_tokens"] > 0  # type: ignore[index]


def test_statistics_count_reused_and_computed_tokens(chat: ChatBlockAttention) -> None:
    first, second = (chat.invoke(asking()) for _ in range(2))
    for message, hits in ((first, 0), (second, 4)):
        usage, reuse = message.usage_metadata, message.response_metadata["block_attention"]
        assert usage is not None
        details = usage["input_token_details"]
        assert details["cache_read"] == reuse["reused_tokens"]
        assert details["cache_read"] + details["cache_creation"] == usage["input_tokens"]
        assert usage["output_tokens"] == 6
        assert reuse["hits"] == hits
    assert first.usage_metadata["input_token_details"]["cache_read"] == 0  # type: ignore[index]
    assert second.response_metadata["finish_reason"] == "length"
    assert second.response_metadata["model_provider"] == "blockattn_rag"


def test_usage_handlers_receive_token_counts_by_model_name(chat: ChatBlockAttention) -> None:
    handler = UsageMetadataCallbackHandler()
    chat.batch([asking(), asking("Who?")], {"callbacks": [handler]})
    (usage,) = handler.usage_metadata.values()
    assert usage["output_tokens"] == 12


def test_options_of_a_call_override_those_of_the_model(chat: ChatBlockAttention) -> None:
    answer = str(chat.invoke(asking()).content)
    assert len(answer) == 6
    assert len(str(chat.invoke(asking(), max_tokens=2).content)) == 2
    assert len(str(chat.invoke(asking(), max_new_tokens=3).content)) == 3
    stopped = chat.invoke(asking(), stop=[answer[1:3]])
    assert stopped.content == answer[: answer.index(answer[1:3])]
    assert stopped.response_metadata["finish_reason"] == "stop"
    stopping = ChatBlockAttention(source=chat.source, stop_sequences=[answer[1:3]], max_tokens=6)
    assert stopping.invoke(asking()).content == stopped.content
    assert chat.invoke(asking(), temperature=2.0, seed=1).content != answer


def test_an_unknown_option_is_refused(chat: ChatBlockAttention) -> None:
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        chat.invoke("Hello", tempurature=1)


def test_token_counts_include_the_chat_template(chat: ChatBlockAttention) -> None:
    messages = chat._convert_input(asking()).to_messages()
    usage = chat.invoke(messages).usage_metadata
    assert usage is not None
    assert chat.get_num_tokens_from_messages(messages) == usage["input_tokens"]
    assert chat.get_num_tokens(format_blocks(passages(1))) == len(passages(1)[0].page_content) - 2


def test_cached_answers_are_returned_without_running_the_model(chat: ChatBlockAttention) -> None:
    cached = ChatBlockAttention(source=chat.source, max_tokens=6, cache=InMemoryCache())
    first = cached.invoke(asking())
    again = cached.batch([asking(), asking("Who?")])
    assert again[0].content == first.content
    assert again[0].usage_metadata["input_token_details"] != {}  # type: ignore[index]


def test_a_model_without_a_chat_template_raises_value_error() -> None:
    model = BlockModel(tiny_model(), tiny_tokenizer(chat=False))
    chat = ChatBlockAttention(engine=BlockAttentionEngine(model))
    with pytest.raises(ValueError, match="has no chat template"):
        chat.invoke("Hello")


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model = tiny_block_model()
    model.hf_model.save_pretrained(folder)
    model.tokenizer.tokenizer.save_pretrained(folder)
    return folder


def test_named_model_is_loaded_once(saved_model: Path, tmp_path: Path, loads: list[Any]) -> None:
    chat = ChatBlockAttention(model=saved_model, kv_store=tmp_path / "kv", max_new_tokens=3)
    chooser = chat.configurable_fields(max_tokens=ConfigurableField("length"))
    answer = chooser.invoke(asking(), {"configurable": {"length": 2}})
    assert len(str(answer.content)) == 2
    assert len(loads) == 1  # shared by the configured copy
    assert copy.deepcopy(chat).engine is chat.engine
    assert isinstance(chat.engine.store, DirectoryStore)


def test_configuring_another_store_keeps_the_recipe(saved_model: Path, tmp_path: Path) -> None:
    model = BlockModel.from_pretrained(saved_model, device="cpu")
    recipe = recipe_of(model)
    chat = ChatBlockAttention(model=saved_model, recipe=recipe, max_new_tokens=3)
    chooser = chat.configurable_fields(kv_store=ConfigurableField("store"))
    chooser.invoke(asking(), {"configurable": {"store": str(tmp_path / "kv")}})
    keys = set(DirectoryStore(tmp_path / "kv").keys())
    expected = BlockAttentionEngine(model, DirectoryStore(tmp_path / "other"), recipe=recipe)
    expected.generate(chat.to_prompt(chat._convert_input(asking()).to_messages()))
    assert keys == set(expected.store.keys())


def test_from_model_id_takes_the_arguments_of_langchain_huggingface(saved_model: Path) -> None:
    chat = ChatBlockAttention.from_model_id(
        str(saved_model), task="text-generation", device=-1, model_kwargs={"dtype": "float32"},
        pipeline_kwargs={"max_new_tokens": 4, "top_k": 3, "repetition_penalty": 1.1},
    )  # fmt: skip
    assert (chat.model_kwargs["device"], chat.max_tokens) == ("cpu", 4)
    assert chat.generate_kwargs == {"top_k": 3, "repetition_penalty": 1.1}
    assert len(str(chat.invoke("Hello").content)) == 4
    kwargs = {"max_new_tokens": 4, "temperature": 0.5, "stop": ["x"], "top_p": 0.9}
    moved = ChatBlockAttention.from_model_id(
        "bundled", pipeline_kwargs={**kwargs, "do_sample": True, "return_full_text": False}
    )
    named = ChatBlockAttention(
        model="bundled", max_tokens=4, temperature=0.5, stop=["x"],
        generate_kwargs={"top_p": 0.9, "do_sample": True},
    )  # fmt: skip
    assert moved.engine_options(None, {}) == named.engine_options(None, {})
    with pytest.raises(ValueError, match="return_full_text"):
        ChatBlockAttention.from_model_id("bundled", pipeline_kwargs={"return_full_text": True})
    with pytest.raises(ValueError, match="text2text"):
        ChatBlockAttention.from_model_id("x", task="text2text-generation")
