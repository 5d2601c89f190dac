"""Repairs of block mode as fields of the model, bound to it, and in what is reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.runnables.base import RunnableBinding

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.attention.context_merge import LearnedMerge
from blockattn_rag.attention.merge_file import save_merge
from blockattn_rag.langchain import (
    BlockKVCompressor,
    BlockKVTransformer,
    ChatBlockAttention,
    format_blocks,
)
from blockattn_rag.model import BlockModel
from blockattn_rag.model.correction_file import save_correction
from blockattn_rag.model.reader import Reader
from tests.engines import local
from tests.langchain.conftest import passages
from tests.model.test_correction import correction_of
from tests.models import tiny_model, tiny_tokenizer

MESSAGES = [("system", format_blocks(passages())), ("human", "Which?")]


def reuse(message: Any) -> dict[str, Any]:
    figures: dict[str, Any] = message.response_metadata["block_attention"]
    return figures


def saved_reader(engine: BlockAttentionEngine, folder: Path, seed: int) -> Reader:
    """A reader that changes answers, in a folder; an earlier one is replaced."""
    reader = Reader.new(engine.model.hf_model, rank=2, seed=seed)
    for matrix in reader.parameters():
        matrix.requires_grad_(False).add_(0.3)
    reader.save(folder, {"fingerprint": engine.model.fingerprint})
    return reader


def saved_correction(
    engine: BlockAttentionEngine, path: Path, sink: str = "none", size: float = 0.1
) -> Path:
    """The file of a correction that changes answers; an earlier one is replaced."""
    save_correction(correction_of(engine.model, sink=sink, size=size), path)
    return path


def saved_merge(engine: BlockAttentionEngine, path: Path, bias: float) -> str:
    """The file of a learned merge; an earlier one is replaced."""
    config = engine.model.config
    heads = config.num_attention_heads, config.num_key_value_heads
    merge = LearnedMerge.identity(config.num_hidden_layers, *heads, config.head_dim)
    save_merge(replace(merge, bias=merge.bias + bias), path, engine.model.fingerprint)
    return str(path)


def test_fields_and_bound_options_are_the_engines(chat: ChatBlockAttention, tmp_path: Path) -> None:
    saved_reader(local(chat.engine), tmp_path / "reader", 0)
    options: dict[str, Any] = {
        "correction": saved_correction(local(chat.engine), tmp_path / "kv.safetensors"),
        "merge": "scale:0.5",
        "promote": 1,
        "reader": tmp_path / "reader",
    }
    prompt = chat.to_prompt(chat._convert_input(MESSAGES).to_messages())
    for name, value in options.items():
        expected = chat.engine.generate(prompt, max_new_tokens=6, **{name: value}).text
        own = ChatBlockAttention(llm=chat, max_tokens=6, **{name: value})
        assert own.invoke(MESSAGES).content == expected
        assert chat.bind(**{name: value}).invoke(MESSAGES).content == expected
    assert chat.invoke(MESSAGES).content != expected  # of the reader


def test_promoted_tokens_are_shown(chat: ChatBlockAttention) -> None:
    assert reuse(chat.invoke(MESSAGES))["promoted_tokens"] == 0
    promoted = chat.bind(promote=1).invoke(MESSAGES)
    assert reuse(promoted)["promoted_tokens"] > 40
    streamed = list(chat.stream(MESSAGES, promote=1))
    assert reuse(streamed[-1])["promoted_tokens"] == reuse(promoted)["promoted_tokens"]


@pytest.mark.parametrize(
    "option",
    [{"merge": "more:2"}, {"promote": "best"}, {"sink": "head"}, {"correction": "nowhere"}],
)
def test_an_option_of_no_known_form_is_refused_at_once(
    chat: ChatBlockAttention, option: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=str(*option.values())):
        ChatBlockAttention(llm=chat, **option)
    if option.keys() <= {"sink", "correction"}:
        with pytest.raises(ValueError, match=str(*option.values())):
            BlockKVTransformer(llm=chat, **option)


def test_a_reader_that_is_not_there_is_refused_at_once(chat: ChatBlockAttention) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ChatBlockAttention(llm=chat, reader="nowhere")


def test_an_answer_cache_tells_repairs_apart(chat: ChatBlockAttention, tmp_path: Path) -> None:
    cache, folder = InMemoryCache(), tmp_path / "reader"

    def ask(**options: Any) -> str:
        model = ChatBlockAttention(source=chat.source, max_tokens=6, cache=cache, **options)
        return str(model.invoke(MESSAGES).content)

    saved_reader(local(chat.engine), folder, 0)
    answers = [ask(), ask(promote=1), ask(merge="scale:0.5"), ask(reader=folder)]
    assert len(cache._cache) == 4
    assert [ask(), ask(promote="1"), ask(merge="scale:0.5"), ask(reader=str(folder))] == answers
    assert len(cache._cache) == 4
    saved_reader(local(chat.engine), folder, 1)  # another one in the same folder
    ask(reader=folder)
    assert len(cache._cache) == 5


@pytest.mark.parametrize("given", ["field", "generate_kwargs"])
def test_an_answer_cache_tells_contents_of_files_apart(
    chat: ChatBlockAttention, tmp_path: Path, given: str
) -> None:
    cache, path = InMemoryCache(), tmp_path / "file.safetensors"

    def ask(**option: Any) -> str:
        options = option if given == "field" else {"generate_kwargs": option}
        model = ChatBlockAttention(source=chat.source, max_tokens=6, cache=cache, **options)
        return str(model.invoke(MESSAGES).content)

    for number, size in enumerate((0.1, 0.1, 0.2)):
        ask(correction=str(saved_correction(local(chat.engine), path, size=size)))
        assert len(cache._cache) == (1, 1, 2)[number]
    for number, bias in enumerate((0.1, 0.1, 0.2)):
        ask(merge=saved_merge(local(chat.engine), path, bias))
        assert len(cache._cache) == (3, 3, 4)[number]


def test_an_answer_cache_tells_engines_options_apart(
    chat: ChatBlockAttention, tmp_path: Path
) -> None:
    cache, path = InMemoryCache(), tmp_path / "kv.safetensors"

    def ask(**options: Any) -> str:
        engine = BlockAttentionEngine(local(chat.engine).model, **options)
        model = ChatBlockAttention(engine=engine, max_tokens=6, cache=cache)
        return str(model.invoke(MESSAGES).content)

    answers = [ask(), ask(sink="bos"), ask(correction=saved_correction(local(chat.engine), path))]
    assert len(cache._cache) == 3
    assert [ask(), ask(sink="bos"), ask(correction=path)] == answers
    assert len(cache._cache) == 3
    ask(correction=saved_correction(local(chat.engine), path, size=0.2))
    assert len(cache._cache) == 4


def test_an_answer_cache_tells_models_of_one_name_apart() -> None:
    engines = [
        BlockAttentionEngine(BlockModel(tiny_model(seed=n), tiny_tokenizer())) for n in (0, 1)
    ]
    one, other = (ChatBlockAttention(engine=engine) for engine in engines)
    assert one.model_name == other.model_name
    assert one._identifying_params != other._identifying_params


def test_an_answer_cache_tells_calibrations_apart(tmp_path: Path) -> None:
    """Without loading the model, which a cached answer does not need."""
    chat = ChatBlockAttention(model="nowhere", kv_store=tmp_path)
    before = chat._identifying_params
    assert chat._identifying_params == before
    (tmp_path / "calibration.json").write_text("{}")
    assert chat._identifying_params != before
    path = tmp_path / "db.json"
    chat = ChatBlockAttention(model="nowhere", model_kwargs={"calibration": str(path)})
    before = chat._identifying_params
    path.write_text("{}")
    assert chat._identifying_params != before


def test_ingestion_takes_a_sink_that_is_bound_or_in_generate_kwargs(
    chat: ChatBlockAttention,
) -> None:
    given = ChatBlockAttention(llm=chat, generate_kwargs={"sink": "head:4"})
    for llm, sink in ((given, "head:4"), (chat.bind(sink="bos"), "bos"), (chat, None)):
        assert BlockKVTransformer(llm=llm).sink == sink
    assert BlockKVTransformer(llm=given.bind(sink="bos").with_config(tags=["a"])).sink == "bos"
    compressor = BlockKVCompressor(llm=given, warm=True)
    compressor.compress_documents(passages(), "Which?")
    compressor.wait_until_warm()
    figures = reuse(given.invoke(MESSAGES))
    assert (figures["hits"], figures["misses"]) == (3, 1)


def test_ingestion_takes_a_correction_that_is_a_field_bound_or_in_generate_kwargs(
    chat: ChatBlockAttention, tmp_path: Path
) -> None:
    path = saved_correction(local(chat.engine), tmp_path / "kv.safetensors", "head:4")
    encoding: dict[str, Any] = {"sink": "head:4", "correction": path}
    given = ChatBlockAttention(llm=chat, generate_kwargs=encoding)
    own = ChatBlockAttention(llm=chat, **encoding)
    expected = {"sink": "head:4", "correction": str(path)}
    for llm in (given, own, chat.bind(**encoding), own.with_config(tags=["a"])):
        assert BlockKVTransformer(llm=llm).passage_encoding == expected
    outer = own.bind(correction="none").bind(sink="bos")
    assert BlockKVTransformer(llm=outer).passage_encoding == {"sink": "bos", "correction": "none"}
    outermost = RunnableBinding(bound=outer, kwargs={"sink": "none"})
    assert BlockKVTransformer(llm=outermost).sink == "none"
    BlockKVTransformer(engine=chat.engine, **encoding).transform_documents(passages())
    compressor = BlockKVCompressor(llm=given, warm=True)
    compressor.compress_documents(passages(), "Which?")
    warmed = compressor.wait_until_warm()
    assert warmed is not None
    assert warmed.reused == 3
    for llm in (own, given, chat.bind(**encoding)):
        assert reuse(llm.invoke(MESSAGES))["hits"] >= 3
    assert reuse(own.invoke(MESSAGES, correction="none"))["misses"] == 3


def test_an_abstention_is_answered_again(chat: ChatBlockAttention) -> None:
    retrying = ChatBlockAttention(llm=chat, max_tokens=6, retry="full")
    local(chat.engine).abstentions = (str(chat.invoke(MESSAGES).content),)
    full = chat.bind(mode="full").invoke(MESSAGES)
    answers = [retrying.invoke(MESSAGES), chat.bind(retry="full").invoke(MESSAGES)]
    assert [answer.content for answer in answers] == [full.content] * 2
    assert [reuse(answer)["retried"] for answer in answers] == ["full"] * 2
