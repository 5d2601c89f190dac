"""Engines and adapters that share a store through its address."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.llama_index import BlockKVTransform
from blockattn_rag.model import BlockModel
from tests.models import save_model, tiny_model, tiny_tokenizer

TEXTS = ["Halden Tower is 214 metres high.", "It was built in 1931.", "How high is it?"]


@pytest.fixture(scope="module")
def model() -> BlockModel:
    return BlockModel(tiny_model(), tiny_tokenizer())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model."""
    return save_model(tiny_model(), tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("kind", ["path", "file", "s3"])
def test_the_next_engine_reuses_stored_blocks_with_the_same_answer(
    model: BlockModel, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    match kind:
        case "path":
            spec = str(tmp_path / "kv")
        case "file":
            spec = f"file://{tmp_path}/kv"
        case _:
            spec = request.getfixturevalue("s3")
    BlockAttentionEngine(model, spec).generate(TEXTS, max_new_tokens=1)
    answers = [
        BlockAttentionEngine(model, store, resident_bytes=0).generate(TEXTS, max_new_tokens=4)
        for store in (spec, "memory:")
    ]
    assert [answer.stats.hits for answer in answers] == [2, 0]
    assert answers[0].token_ids == answers[1].token_ids


def test_a_memory_store_is_not_shared_between_processes(folder: Path) -> None:
    transform = BlockKVTransform(model_name=str(folder), kv_store="memory:1MB")
    assert str(transform.to_dict()["store"]).startswith("MemoryStore ")
    with pytest.raises(pickle.PicklingError, match="stores blocks in this process's memory"):
        pickle.dumps(transform)
