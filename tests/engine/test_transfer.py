"""Blocks on their way: nobody reads a layer before it is there, and nothing is lost."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.engine.transfer import _Transfer, bring, send
from blockattn_rag.kv.block_kv import BlockKV, place
from blockattn_rag.model import BlockModel, EncodeRequest
from blockattn_rag.store import DirectoryStore
from tests.holding import LONGEST_S
from tests.models import shared_tiny_llama, tiny_tokenizer

CPU = torch.device("cpu")
PROMPT = ["A first passage. ", "Another one. ", "And the question?"]


@pytest.fixture(scope="module")
def model() -> BlockModel:
    return BlockModel(shared_tiny_llama(), tiny_tokenizer())


@pytest.fixture
def blocks(model: BlockModel) -> list[BlockKV]:
    rows = [list(range(1, 41)), [6, 7, 8]]  # a question reads the first where it lies
    requests = [EncodeRequest(row, str(i), "") for i, row in enumerate(rows)]
    return [kv for batch in model.encode(requests) for kv in batch]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Layers move only when somebody waits for them, and are not numbers before; in what order."""
    asked = [threading.Event() for _ in range(16)]
    moved: list[int] = []
    empty_copy, move, wait = _Transfer._empty_copy, _Transfer._move, _Transfer.wait

    def poisoned(self: _Transfer, kv: BlockKV) -> BlockKV:
        copy = empty_copy(self, kv)
        for states in (*copy.keys, *copy.values):
            states.fill_(torch.nan)
        return copy

    def held_back(self: _Transfer, layer: int) -> None:
        assert asked[layer].wait(LONGEST_S)
        move(self, layer)
        moved.append(layer)

    def asking(self: _Transfer, layer: int) -> None:
        asked[layer].set()
        wait(self, layer)

    monkeypatch.setattr(_Transfer, "_empty_copy", poisoned)
    monkeypatch.setattr(_Transfer, "_move", held_back)
    monkeypatch.setattr(_Transfer, "wait", asking)
    yield moved
    for event in asked:
        event.set()


def test_what_arrives_is_what_was_sent_in_memory_of_its_own(blocks: list[BlockKV]) -> None:
    for sent, copy in zip(blocks, send(blocks, CPU), strict=True):
        for layer in range(sent.num_layers):
            for mine, theirs in zip(sent.states(layer), copy.states(layer), strict=True):
                assert torch.equal(mine, theirs)
                assert mine.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr()
        assert (copy.digest, copy.handle) == (sent.digest, sent.handle)
        assert copy.nbytes == sent.nbytes
        places = {t.untyped_storage().data_ptr() for t in (*copy.keys, *copy.values)}
        assert len(places) == 1


@pytest.mark.parametrize("assembly", ["relay", "copy"])
@pytest.mark.parametrize("question", [[9, 10, 11], [9]])
def test_the_model_reads_no_layer_before_it_is_there(
    model: BlockModel, blocks: list[BlockKV], late: list[int], assembly: str, question: list[int]
) -> None:
    ids = torch.tensor([question])
    expected = model.next_logits(ids, model.cache_for(place(blocks), assembly=assembly))  # type: ignore[arg-type]
    arriving = place(send(blocks, CPU))
    found = model.next_logits(ids, model.cache_for(arriving, assembly=assembly))  # type: ignore[arg-type]
    assert torch.equal(found, expected)
    assert late == sorted(late) == list(range(blocks[0].num_layers))


def test_a_copy_of_an_arriving_block_is_whole(blocks: list[BlockKV], late: list[int]) -> None:
    (arriving,) = send(blocks[:1], CPU)
    copy = arriving.copy_to(CPU)
    assert copy.arrival is None
    for layer in range(copy.num_layers):
        assert torch.equal(copy.keys[layer], blocks[0].keys[layer])
        assert torch.equal(copy.values[layer], blocks[0].values[layer])


def test_a_transfer_that_fails_is_an_error_of_whoever_waits(
    blocks: list[BlockKV], monkeypatch: pytest.MonkeyPatch
) -> None:
    move = _Transfer._move

    def fail(self: _Transfer, layer: int) -> None:
        if layer == 1:
            raise OSError("out of page-locked memory")
        move(self, layer)

    monkeypatch.setattr(_Transfer, "_move", fail)
    copies = send(blocks, CPU)
    for layer in (1, 2):
        with pytest.raises(RuntimeError, match="moving blocks to cpu failed: out of page-locked"):
            copies[0].states(layer)


def test_after_a_transfer_that_failed_blocks_are_read_again(
    model: BlockModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = BlockAttentionEngine(model, DirectoryStore(tmp_path))
    expected = engine.generate(PROMPT, max_new_tokens=5)
    monkeypatch.setattr(
        "blockattn_rag.engine.fetcher.bring", lambda kvs, device, **_: send(kvs, device)
    )
    engine = BlockAttentionEngine(model, DirectoryStore(tmp_path))

    def fail(self: _Transfer, layer: int) -> None:
        raise OSError("out of page-locked memory")

    with monkeypatch.context() as patched:
        patched.setattr(_Transfer, "_move", fail)
        with pytest.raises(RuntimeError, match="page-locked"):
            engine.generate(PROMPT, max_new_tokens=5)
    found = engine.generate(PROMPT, max_new_tokens=5, on_miss="error")
    assert found.token_ids == expected.token_ids


def test_a_block_that_nobody_holds_is_freed_at_once(blocks: list[BlockKV]) -> None:
    copies = send(blocks, CPU)
    for layer in range(copies[0].num_layers):
        copies[0].states(layer)
    for thread in threading.enumerate():
        if thread.name == "blockattn-transfer":
            thread.join(10)
    memory = weakref.ref(copies[0].keys[0])
    gc.disable()
    try:
        del copies
        assert memory() is None
    finally:
        gc.enable()


def test_on_the_cpu_blocks_are_there_at_once(blocks: list[BlockKV]) -> None:
    assert bring(blocks, CPU) == blocks


def test_copies_keep_each_layers_number_type_and_share_no_token_ids(blocks: list[BlockKV]) -> None:
    mixed = replace(blocks[0], values=tuple(t.half() for t in blocks[0].values))
    (copy,) = send([mixed], CPU)
    for layer in range(mixed.num_layers):
        for found, expected in zip(copy.states(layer), mixed.states(layer), strict=True):
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
    assert copy.token_ids.data_ptr() != mixed.token_ids.data_ptr()


def test_an_engine_answers_from_blocks_that_are_still_arriving(
    model: BlockModel, tmp_path: Path, late: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = BlockAttentionEngine(model, DirectoryStore(tmp_path)).generate(
        PROMPT, max_new_tokens=5
    )
    monkeypatch.setattr(
        "blockattn_rag.engine.fetcher.bring", lambda kvs, device, **_: send(kvs, device)
    )
    engine = BlockAttentionEngine(model, DirectoryStore(tmp_path))
    for _ in range(2):  # from the store, then from what was kept
        found = engine.generate(PROMPT, max_new_tokens=5, on_miss="error")
        assert found.token_ids == expected.token_ids
    assert late == list(range(model.config.num_hidden_layers))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_blocks_arrive_beside_the_models_work(blocks: list[BlockKV]) -> None:
    device = torch.device("cuda", 0)
    for _ in range(20):
        work = torch.randn(2048, 2048, device=device)
        copies = bring(blocks, device)
        for layer in range(blocks[0].num_layers):
            work = work @ work / 100
            for sent, copy in zip(blocks, copies, strict=True):
                assert torch.equal(copy.states(layer)[0].cpu(), sent.keys[layer])
                assert torch.equal(copy.states(layer)[1].cpu(), sent.values[layer])
