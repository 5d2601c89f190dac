"""Repairs of block mode as fields of the LLM, per call, and in what is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blockattn_rag.llama_index import BlockAttentionLLM, BlockKVTransform
from blockattn_rag.llama_index.events import BlockReuseEvent
from blockattn_rag.llama_index.nodes import canonical_text
from blockattn_rag.model.correction_file import save_correction
from blockattn_rag.model.reader import Reader
from blockattn_rag.prompts.markers import wrap
from tests.llama_index.conftest import RecordingEngine, passages
from tests.model.test_correction import correction_of

MARKED = f"Head. {''.join(wrap(canonical_text(node)) for node in passages(3))}Q"
NAMES = ("correction", "merge", "promote", "reader")


@pytest.fixture
def reader(engine: RecordingEngine, tmp_path: Path) -> Path:
    made = Reader.new(engine.model.hf_model, rank=1)
    made.save(tmp_path / "reader", {"fingerprint": engine.model.fingerprint})
    return tmp_path / "reader"


@pytest.fixture
def correction(engine: RecordingEngine, tmp_path: Path) -> Path:
    """The file of a correction of blocks that are encoded after their head."""
    return saved_correction(engine, tmp_path / "kv.safetensors")


def saved_correction(engine: RecordingEngine, path: Path, size: float = 0.1) -> Path:
    save_correction(correction_of(engine.model, sink="head:4", size=size), path)
    return path


def test_fields_reach_the_engine_and_a_call_overrides_them(
    engine: RecordingEngine, reader: Path, correction: Path
) -> None:
    llm = BlockAttentionLLM(
        engine=engine,
        max_new_tokens=4,
        sink="head:4",
        correction=correction,
        merge="scale:0.9",
        promote=1,
        reader=reader,
    )
    llm.complete(MARKED)
    llm.complete(MARKED, correction="none", promote="last:2", merge="none", reader="none")
    found = [[call.options[name] for name in NAMES] for call in engine.calls]
    fields = [str(correction), "scale:0.9", "1", str(reader)]
    assert found == [fields, ["none", "none", "last:2", "none"]]
    copy = BlockAttentionLLM(engine=engine, **{name: getattr(llm, name) for name in NAMES})
    assert [copy.to_dict()[name] for name in NAMES] == found[0]


def test_what_is_not_said_is_the_engines_own(block_model: Any) -> None:
    engine = RecordingEngine(block_model, promote=1)
    usage = BlockAttentionLLM(engine=engine, max_new_tokens=4).complete(MARKED).raw["usage"]
    assert usage["promoted_tokens"] > 0


def test_promoted_tokens_are_shown(llm: BlockAttentionLLM) -> None:
    promoted = llm.complete(MARKED, promote=1).raw["usage"]
    plain = llm.complete(MARKED).raw["usage"]
    length = len(llm.to_prompt(MARKED, formatted=False).context[1].rendered)
    assert (promoted["promoted_tokens"], plain["promoted_tokens"]) == (length, 0)
    stats = llm.engine.generate(llm.to_prompt(MARKED), promote=1, max_new_tokens=1).stats
    assert BlockReuseEvent(stats=stats).model_dump()["promoted_tokens"] == length


@pytest.mark.parametrize(
    "option",
    [
        {"merge": "more:2"},
        {"promote": "best"},
        {"reader": "nowhere"},
        {"sink": "head"},
        {"correction": "nowhere"},
    ],
)
def test_an_option_of_no_known_form_is_refused_at_once(
    engine: RecordingEngine, option: dict[str, Any]
) -> None:
    kinds: list[Any] = [BlockAttentionLLM]
    kinds += [BlockKVTransform] * (option.keys() <= {"sink", "correction"})
    for kind in kinds:
        with pytest.raises((ValueError, FileNotFoundError), match=str(*option.values())):
            kind(engine=engine, **option)


def test_ingestion_takes_a_sink_from_generate_kwargs(engine: RecordingEngine) -> None:
    llm = BlockAttentionLLM(
        engine=engine, max_new_tokens=4, sink="bos", generate_kwargs={"sink": "head:4"}
    )
    BlockKVTransform(llm=llm)(passages(3))
    usage = llm.complete(MARKED, formatted=True).raw["usage"]
    assert (usage["hits"], usage["misses"]) == (3, 1)


@pytest.mark.parametrize("given", ["fields", "generate_kwargs"])
def test_ingestion_takes_the_correction_of_the_llm(
    engine: RecordingEngine, correction: Path, given: str
) -> None:
    encoding: dict[str, Any] = {"sink": "head:4", "correction": correction}
    options = encoding if given == "fields" else {"generate_kwargs": encoding}
    llm = BlockAttentionLLM(engine=engine, max_new_tokens=4, **options)
    transform = BlockKVTransform(llm=llm)
    transform(passages(3))
    assert (transform.sink, transform.correction) == ("head:4", str(correction))
    usage = llm.complete(MARKED, formatted=True).raw["usage"]
    assert (usage["hits"], usage["misses"]) == (3, 1)
    plain = llm.complete(MARKED, formatted=True, correction="none").raw["usage"]
    assert (plain["hits"], plain["misses"]) == (1, 3)


def test_ingestion_by_itself_takes_a_correction(engine: RecordingEngine, correction: Path) -> None:
    encoding: dict[str, Any] = {"sink": "head:4", "correction": correction}
    transform = BlockKVTransform(engine=engine, **encoding)
    transform(passages(3))
    llm = BlockAttentionLLM(engine=engine, max_new_tokens=4, **encoding)
    assert llm.complete(MARKED, formatted=True).raw["usage"]["hits"] == 3
    other = BlockKVTransform(llm=llm, sink="bos", correction="none")
    assert (other.sink, other.correction) == ("bos", "none")


def test_a_cached_ingestion_ends_with_the_contents_of_its_correction(
    engine: RecordingEngine, correction: Path
) -> None:
    transform = BlockKVTransform(engine=engine, sink="head:4", correction=correction)
    first = transform.to_dict()
    assert transform.to_dict() == first
    saved_correction(engine, correction, size=0.2)
    assert transform.to_dict() != first
    assert BlockKVTransform(engine=engine).to_dict()["correction_digest"] is None
    loaded = BlockKVTransform.from_dict({**first, "model_name": "bundled", "kv_store": None})
    assert (loaded.sink, loaded.correction) == ("head:4", str(correction))


def test_an_abstention_is_answered_again(engine: RecordingEngine) -> None:
    llm = BlockAttentionLLM(engine=engine, max_new_tokens=4, retry="full")
    engine.abstentions = (engine.generate(llm.to_prompt(MARKED), max_new_tokens=4).text,)
    answer = llm.complete(MARKED, formatted=True)
    assert answer.raw["usage"]["retried"] == "full"
    assert answer.text == llm.complete(MARKED, formatted=True, mode="full").text
    assert llm.complete(MARKED, formatted=True, retry="none").raw["usage"]["retried"] == "none"
