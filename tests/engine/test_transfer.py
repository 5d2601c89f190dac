"""Pending copies of blocks: no layer is read before it is copied, and nothing is lost."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.engine.transfer import copy_async, to_device
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import place
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


class Gate:
    """A pending copy of the block that is copied: lets a layer through when it is asked for."""

    failed = False

    def __init__(self) -> None:
        self.asked = [threading.Event() for _ in range(16)]
        self.passed: list[int] = []

    def wait(self, layer: int) -> None:
        assert self.asked[layer].wait(LONGEST_S)
        self.passed.append(layer)


class Asks:
    """What readers of a copy wait for: opens the gate for a layer, then waits for the copy."""

    failed = False

    def __init__(self, gate: Gate, copy: BlockKV) -> None:
        self._gate = gate
        self._copy = copy

    def wait(self, layer: int) -> None:
        self._gate.asked[layer].set()
        self._copy.states(layer)


class Breaks:
    """A pending copy of the block that is copied, which fails in one layer."""

    failed = False

    def __init__(self, layer: int) -> None:
        self._layer = layer

    def wait(self, layer: int) -> None:
        if layer == self._layer:
            raise OSError("out of page-locked memory")


def copied_late(blocks: list[BlockKV], gate: Gate) -> list[BlockKV]:
    """Copies whose layers are filled when somebody waits for them, and are not numbers before."""
    copies = copy_async([replace(blocks[0], pending_copy=gate), *blocks[1:]], CPU)
    for copy in copies:
        for states in (*copy.keys, *copy.values):
            states.fill_(torch.nan)
    return [replace(copy, pending_copy=Asks(gate, copy)) for copy in copies]


class CopyingStore(DirectoryStore):
    """Gives copies that are still pending."""

    def __init__(self, path: Path, copy: Callable[[BlockKV], BlockKV]) -> None:
        super().__init__(path)
        self.copy = copy

    def get(self, key: str) -> BlockKV | None:
        kv = super().get(key)
        return None if kv is None else self.copy(kv)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    for event in gate.asked:
        event.set()


def test_what_arrives_is_what_was_sent_in_memory_of_its_own(blocks: list[BlockKV]) -> None:
    for sent, copy in zip(blocks, copy_async(blocks, CPU), strict=True):
        for layer in range(sent.num_layers):
            for mine, theirs in zip(sent.states(layer), copy.states(layer), strict=True):
                assert torch.equal(mine, theirs)
                assert mine.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr()
        assert (copy.digest, copy.handle) == (sent.digest, sent.handle)
        assert copy.nbytes == sent.nbytes
        places = {t.untyped_storage().data_ptr() for t in (*copy.keys, *copy.values)}
        assert len(places) == 1


def test_scales_arrive_with_the_numbers_that_they_belong_to(blocks: list[BlockKV]) -> None:
    sent = [kv.quantised() if place % 2 else kv for place, kv in enumerate(blocks)]
    for mine, theirs in zip(sent, copy_async(sent, CPU), strict=True):
        for layer in range(mine.num_layers):
            theirs.stored(layer)  # waits for it
            pairs = zip(mine.tensors(layer), theirs.tensors(layer), strict=True)
            assert all(torch.equal(*pair) and pair[0] is not pair[1] for pair in pairs)
        assert theirs.token_outline == mine.token_outline
        places = {t.untyped_storage().data_ptr() for t in theirs.tensors(0)}
        assert len(places) == 1


@pytest.mark.parametrize("assembly", ["relay", "copy"])
@pytest.mark.parametrize("question", [[9, 10, 11], [9]])
def test_the_model_reads_no_layer_before_it_is_there(
    model: BlockModel, blocks: list[BlockKV], gate: Gate, assembly: str, question: list[int]
) -> None:
    ids = torch.tensor([question])
    expected = model.next_logits(ids, model.cache_for(place(blocks), assembly=assembly))  # type: ignore[arg-type]
    arriving = place(copied_late(blocks, gate))
    found = model.next_logits(ids, model.cache_for(arriving, assembly=assembly))  # type: ignore[arg-type]
    assert torch.equal(found, expected)
    assert gate.passed == list(range(blocks[0].num_layers))


def test_a_copy_of_an_arriving_block_is_whole(blocks: list[BlockKV], gate: Gate) -> None:
    (arriving,) = copied_late(blocks[:1], gate)
    copy = arriving.copy_to(CPU)
    assert copy.pending_copy is None
    for layer in range(copy.num_layers):
        assert torch.equal(copy.keys[layer], blocks[0].keys[layer])
        assert torch.equal(copy.values[layer], blocks[0].values[layer])


def test_a_copy_that_fails_is_an_error_of_whoever_waits(blocks: list[BlockKV]) -> None:
    copies = copy_async([replace(blocks[0], pending_copy=Breaks(1)), *blocks[1:]], CPU)
    for layer in (1, 2):
        with pytest.raises(RuntimeError, match="moving blocks to cpu failed: out of page-locked"):
            copies[0].states(layer)


def test_after_a_copy_that_failed_blocks_are_read_again(model: BlockModel, tmp_path: Path) -> None:
    expected = BlockAttentionEngine(model, DirectoryStore(tmp_path)).generate(
        PROMPT, max_new_tokens=5
    )
    store = CopyingStore(
        tmp_path, lambda kv: copy_async([replace(kv, pending_copy=Breaks(0))], CPU)[0]
    )
    engine = BlockAttentionEngine(model, store)
    with pytest.raises(RuntimeError, match="page-locked"):
        engine.generate(PROMPT, max_new_tokens=5)
    store.copy = lambda kv: kv
    found = engine.generate(PROMPT, max_new_tokens=5, on_miss="error")
    assert found.token_ids == expected.token_ids


def test_a_block_that_nobody_holds_is_freed_at_once(blocks: list[BlockKV]) -> None:
    copies = copy_async(blocks, CPU)
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
    assert to_device(blocks, CPU) == blocks


def test_copies_keep_each_layers_number_type_and_share_no_token_ids(blocks: list[BlockKV]) -> None:
    mixed = replace(blocks[1], keys=tuple(t.half() for t in blocks[1].keys))
    (copy,) = copy_async([mixed], CPU)
    for layer in range(mixed.num_layers):
        for found, expected in zip(copy.states(layer), mixed.states(layer), strict=True):
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
    # All in the piece of memory that CUDA is told to keep until the copies end.
    assert len({t.untyped_storage().data_ptr() for t in (*copy.keys, *copy.values)}) == 1
    assert copy.token_ids.data_ptr() != mixed.token_ids.data_ptr()


def test_an_engine_answers_from_blocks_whose_copies_are_pending(
    model: BlockModel, tmp_path: Path
) -> None:
    expected = BlockAttentionEngine(model, DirectoryStore(tmp_path)).generate(
        PROMPT, max_new_tokens=5
    )
    gates: list[Gate] = []

    def late(kv: BlockKV) -> BlockKV:
        gates.append(Gate())
        return copied_late([kv], gates[-1])[0]

    engine = BlockAttentionEngine(model, CopyingStore(tmp_path, late))
    for _ in range(2):  # from the store, then from what was kept
        found = engine.generate(PROMPT, max_new_tokens=5, on_miss="error")
        assert found.token_ids == expected.token_ids
    layers = list(range(model.config.num_hidden_layers))
    assert [gate.passed for gate in gates] == [layers, layers]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_blocks_arrive_beside_the_models_work(blocks: list[BlockKV]) -> None:
    device = torch.device("cuda", 0)
    for _ in range(20):
        work = torch.randn(2048, 2048, device=device)
        copies = to_device(blocks, device)
        for layer in range(blocks[0].num_layers):
            work = work @ work / 100
            for sent, copy in zip(blocks, copies, strict=True):
                assert torch.equal(copy.states(layer)[0].cpu(), sent.keys[layer])
                assert torch.equal(copy.states(layer)[1].cpu(), sent.values[layer])
