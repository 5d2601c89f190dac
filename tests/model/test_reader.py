"""Readers act on the final block and the answer of a request alone, and as PEFT's LoRA does."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor

from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import Context, assemble
from blockattn_rag.kv.rope import relative_error
from blockattn_rag.model import BlockModel, fingerprint
from blockattn_rag.model.graphs import record_graphs
from blockattn_rag.model.packing import _is_available
from blockattn_rag.model.reader import Reader
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.model.tolerances import LOGITS
from tests.model.families import SUPPORTED
from tests.model.test_graphs import LogRecorder
from tests.model.test_relay_attention import BLOCKS, FINAL_IDS, encoded, random_ids
from tests.models import tiny_model, tiny_tokenizer

NEW = 6
FINAL = torch.tensor([FINAL_IDS])
CLOSE = LOGITS[torch.float32]


def block_model(family: str = "llama", **options: Any) -> BlockModel:
    kind, config = SUPPORTED[family]
    return BlockModel(tiny_model(kind, **config), tiny_tokenizer(), **options)


@pytest.fixture
def llama() -> BlockModel:
    return block_model()


def trained(model: BlockModel, seed: int = 0, size: float = 0.1, **options: Any) -> Reader:
    """A frozen reader that changes answers."""
    reader = Reader.new(model.hf_model, rank=4, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed)
    for matrix in reader.parameters():
        matrix.requires_grad_(False).add_(torch.randn(matrix.shape, generator=generator) * size)
    return reader


def logits(
    model: BlockModel, reader: Reader | None, context: Context, assembly: Any = "copy"
) -> Tensor:
    return model.next_logits(FINAL, model.cache_for(context, assembly=assembly, reader=reader))


def answer(
    model: BlockModel,
    reader: Reader | None,
    context: Context,
    assembly: Any = "copy",
    on_token: Any = None,
    **extra: Any,
) -> list[int]:
    return model.generate(
        context.token_ids,
        FINAL_IDS,
        Sampling(max_new_tokens=NEW, extra=extra),
        cache=model.cache_for(context, assembly=assembly, reader=reader),
        on_token=on_token,
    )


def states_of(context: Context) -> list[Tensor]:
    kvs: Sequence[BlockKV] = [block.kv for block in context.blocks]
    return [tensor for kv in kvs for tensor in (*kv.keys, *kv.values)]


def assert_same_bits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# -- what it computes ------------------------------------------------------------------------


def wrapped_logits(model: BlockModel, folder: Path, context: Context, wrapped: Any) -> Tensor:
    """By hand: the stock model's keys and values of the context, and PEFT for the rest."""
    cache = DynamicCache(config=model.config)
    for index, (keys, values) in enumerate(assemble(context, model.profile.layouts)):
        cache.update(keys[None], values[None], index)
    adapted: Any = PeftModel.from_pretrained(wrapped, str(folder))
    with torch.inference_mode():
        output: Tensor = adapted(input_ids=FINAL, past_key_values=cache, use_cache=True).logits
    return output[0, -1]


ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, all": ("llama", {"target_modules": "all-linear"}),
    "llama, patterns": (
        "llama",
        {
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "rank_pattern": {"v_proj": 3, r"model\.layers\.1\..*q_proj": 5},
            "alpha_pattern": {"layers.2.mlp.down_proj": 7},
        },
    ),
    "llama, rslora": ("llama", {"target_modules": r".*layers\.[02].*_proj", "use_rslora": True}),
    "llama, some layers": (
        "llama",
        {"target_modules": ["q_proj"], "layers_to_transform": [0, 2], "layers_pattern": "layers"},
    ),
    "llama, one layer": ("llama", {"target_modules": ["o_proj"], "layers_to_transform": 1}),
    "llama, all but": (
        "llama",
        {"target_modules": ["k_proj", "o_proj"], "exclude_modules": ["layers.1.self_attn.k_proj"]},
    ),
    "llama, the head": ("llama", {"target_modules": ["lm_head", "v_proj"]}),
    "qwen2, biased": ("qwen2", {"target_modules": ["q_proj", "k_proj", "v_proj"]}),
    "phi3, fused": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "gpt_neox, fused": ("gpt_neox", {"target_modules": ["query_key_value", "dense_4h_to_h"]}),
    "gemma2, window": ("gemma2", {"target_modules": "all-linear"}),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_of_peft_gives_what_peft_gives_on_the_final_block(
    name: str, tmp_path: Path
) -> None:
    family, options = ADAPTERS[name]
    kind, settings = SUPPORTED[family]
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=6, init_lora_weights=False, **options)
    made: Any = get_peft_model(tiny_model(kind, **settings), config)
    made.save_pretrained(str(tmp_path), save_embedding_layers=False)
    model = block_model(family)
    context = encoded(model, BLOCKS)
    expected = wrapped_logits(model, tmp_path, context, tiny_model(kind, **settings))
    reader = model.load_reader(tmp_path)
    found = logits(model, reader, context)
    assert relative_error(found, expected) <= CLOSE
    assert relative_error(logits(model, None, context), expected) > 100 * CLOSE
    if model.supports_relay:
        assert relative_error(logits(model, reader, context, "relay"), expected) <= CLOSE


def test_a_reader_that_was_saved_is_the_same_and_peft_reads_it(
    llama: BlockModel, tmp_path: Path
) -> None:
    context = encoded(llama, BLOCKS)
    reader = trained(llama)
    found = logits(llama, reader, context)
    reader.save(tmp_path / "reader", {"fingerprint": llama.fingerprint, "samples": 3})
    loaded = llama.load_reader(tmp_path / "reader")
    assert torch.equal(logits(llama, loaded, context), found)
    assert loaded.digest == reader.digest
    assert loaded.metadata["samples"] == 3
    expected = wrapped_logits(llama, tmp_path / "reader", context, tiny_model("llama"))
    assert relative_error(found, expected) <= CLOSE


def test_a_new_reader_changes_nothing_and_a_seed_gives_the_same_one(llama: BlockModel) -> None:
    context = encoded(llama, BLOCKS)
    stock = logits(llama, None, context)
    readers = [Reader.new(llama.hf_model, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(logits(llama, readers[0], context), stock)
    digests = [reader.digest for reader in readers]
    assert digests[0] == digests[1] != digests[2]


def test_targets_are_all_linear_layers_but_the_head_or_those_that_are_named(
    llama: BlockModel,
) -> None:
    every = Reader.new(llama.hf_model)
    assert len(every.layers) == 3 * 7
    assert "lm_head" not in every.layers
    some = Reader.new(llama.hf_model, targets=["q_proj", "layers.1.mlp.up_proj"])
    assert sorted(some.layers) == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.2.self_attn.q_proj",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be a whole number of at least 1, found 0"),
        ({"rank": True}, "found True"),
        ({"alpha": -1}, "alpha must be a number above 0, found -1"),
        ({"alpha": float("nan")}, "found nan"),
        ({"targets": ["q_proj", "qkv"]}, "has no layers qkv to adapt"),
        ({"targets": []}, "found no targets"),
        ({"targets": ["embed_tokens"]}, "model.embed_tokens is a Embedding"),
    ],
)
def test_a_wrong_wish_is_refused(llama: BlockModel, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Reader.new(llama.hf_model, **options)


def test_a_model_that_peft_wraps_is_refused() -> None:
    wrapped: Any = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="merge_and_unload"):
        Reader.new(wrapped)


def test_a_reader_for_another_model_is_refused(llama: BlockModel) -> None:
    wider = BlockModel(tiny_model("llama", hidden_size=64), tiny_tokenizer())
    context = encoded(wider, BLOCKS)
    with pytest.raises(ValueError, match=r"has Linear\(in_features=64, out_features=32"):
        wider.cache_for(context, reader=trained(llama))
    deeper = BlockModel(tiny_model("llama", num_hidden_layers=4), tiny_tokenizer())
    with pytest.raises(ValueError, match="has none there"):
        llama.cache_for(encoded(llama, BLOCKS), reader=trained(deeper))


# -- where it acts ---------------------------------------------------------------------------


def test_blocks_and_fingerprint_stay_the_stock_models(llama: BlockModel) -> None:
    before, mark = states_of(encoded(llama, BLOCKS)), llama.fingerprint
    reader = trained(llama)
    reader.attach(llama.hf_model)
    during: list[Context] = []

    def encode_more(_: int) -> None:
        during.append(encoded(llama, BLOCKS))

    answer(llama, reader, encoded(llama, BLOCKS), on_token=encode_more)
    assert len(during) == NEW
    for context in (encoded(llama, BLOCKS), *during):
        assert_same_bits(states_of(context), before)
    assert llama.fingerprint == mark
    fresh = block_model()
    reader.attach(fresh.hf_model)
    assert fresh.fingerprint == mark  # measured with the hooks in place


def test_attaching_reads_no_weights_again(
    llama: BlockModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = llama.fingerprint

    def read(_: Any) -> str:
        raise AssertionError("the weights were read again")

    monkeypatch.setattr(fingerprint, "weights_digest", read)
    answer(llama, trained(llama), encoded(llama, BLOCKS), "relay")
    assert llama.fingerprint == mark
    llama.hf_model.model.layers[0].self_attn.scaling = 0.7
    with pytest.raises(AssertionError, match="read again"):  # as after any other change
        _ = llama.fingerprint


def test_full_mode_is_the_stock_models(llama: BlockModel) -> None:
    context = encoded(llama, BLOCKS)
    ids = torch.tensor([[*context.token_ids, *FINAL_IDS]])
    expected = llama.next_logits(ids)
    sampling = Sampling(max_new_tokens=NEW)
    tokens = llama.generate(context.token_ids, FINAL_IDS, sampling)
    reader = trained(llama)
    found: list[Tensor] = []

    def run_full(_: int) -> None:
        found.append(llama.next_logits(ids))

    adapted = answer(llama, reader, context, on_token=run_full)
    assert adapted != answer(llama, None, context)
    assert_same_bits(found, [expected] * NEW)
    assert llama.generate(context.token_ids, FINAL_IDS, sampling) == tokens


@pytest.mark.parametrize("assembly", ["copy", "relay"])
def test_nothing_is_repaired_over_the_first_block_alone(llama: BlockModel, assembly: str) -> None:
    context = encoded(llama, BLOCKS[:1])
    expected = logits(llama, None, context, assembly)
    assert torch.equal(logits(llama, trained(llama), context, assembly), expected)
    assert llama.cache_for(Context(()), reader=trained(llama)) is None


def test_readers_and_none_take_turns_in_one_process(llama: BlockModel) -> None:
    context = encoded(llama, BLOCKS)
    readers = [None, trained(llama, 1), trained(llama, 2, targets=["q_proj"])]
    first = [logits(llama, reader, context) for reader in readers]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not torch.equal(first[one], first[other])
    for _ in range(2):
        for assembly in ("copy", "relay"):
            again = [logits(llama, reader, context, assembly) for reader in readers]
            errors = [relative_error(a, b) for a, b in zip(again, first, strict=True)]
            assert max(errors) <= CLOSE


def test_threads_with_different_readers_get_their_own_answers(llama: BlockModel) -> None:
    other_model = copy.deepcopy(llama.hf_model)  # which another thread may run at the same time
    models = [llama, llama, BlockModel(other_model, tiny_tokenizer())]
    readers = [trained(llama, 1), None, trained(llama, 2)]
    context = encoded(llama, BLOCKS)
    jobs = [*zip(models, readers, strict=True)]
    expected = [answer(model, reader, context, "relay") for model, reader in jobs]
    assert len({tuple(tokens) for tokens in expected}) == 3
    found: dict[int, list[list[int]]] = {}

    def run(index: int) -> None:
        model, reader = jobs[index]
        found[index] = [answer(model, reader, context, "relay") for _ in range(5)]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {index: [tokens] * 5 for index, tokens in enumerate(expected)}


def test_a_request_within_a_request_has_its_own_reader(llama: BlockModel) -> None:
    context = encoded(llama, BLOCKS)
    outer, inner = trained(llama, 1), trained(llama, 2)
    expected, inside = answer(llama, outer, context), answer(llama, inner, context)
    found: list[list[int]] = []
    again = answer(
        llama, outer, context, on_token=lambda _: found.append(answer(llama, inner, context))
    )
    assert again == expected
    assert found == [inside] * NEW


class RunsTheModel(LogitsProcessor):
    """Notes what the model gives for the last tokens alone, without the cache of the request."""

    def __init__(self, hf_model: Any) -> None:
        self._hf_model = hf_model
        self.found: list[Tensor] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.found.append(self._hf_model(input_ids[:, :5], use_cache=False).logits)
        self.found.append(self._hf_model(input_ids[:, :5], past_key_values=DynamicCache()).logits)
        return scores


@pytest.mark.parametrize("assembly", ["copy", "relay"])
def test_a_processor_that_runs_the_model_sees_the_stock_model(
    llama: BlockModel, assembly: str
) -> None:
    context, reader = encoded(llama, BLOCKS), trained(llama)
    with torch.inference_mode():
        stock = llama.hf_model(torch.tensor([context.token_ids[:5]])).logits
    expected = answer(llama, reader, context, assembly)
    processor = RunsTheModel(llama.hf_model)
    assert answer(llama, reader, context, assembly, logits_processor=[processor]) == expected
    assert_same_bits(processor.found, [stock] * (2 * NEW))


@pytest.mark.parametrize("extra", [{"num_beams": 3}, {"guidance_scale": 2.0}], ids=str)
def test_beams_and_guidance_give_the_same_on_both_paths(llama: BlockModel, extra: Any) -> None:
    context, reader = encoded(llama, BLOCKS), trained(llama)
    by_copy, by_relay = (answer(llama, reader, context, a, **extra) for a in ("copy", "relay"))
    assert by_copy == by_relay != answer(llama, None, context, **extra)


def test_streamed_tokens_are_the_answers(llama: BlockModel) -> None:
    streamed: list[int] = []
    context = encoded(llama, BLOCKS)
    assert answer(llama, trained(llama), context, "relay", on_token=streamed.append) == streamed


@pytest.mark.parametrize("assembly", ["copy", "relay"])
def test_a_batch_of_unequal_prompts_gets_the_answers_that_each_gets_alone(
    llama: BlockModel, assembly: Any
) -> None:
    reader = trained(llama)
    contexts = [encoded(llama, [BLOCKS[i] for i in order]) for order in ([0, 1, 2, 3], [2, 0])]
    finals = [FINAL_IDS, random_ids(5, 7)]
    prompts = [(c.token_ids, final) for c, final in zip(contexts, finals, strict=True)]
    sampling = Sampling(max_new_tokens=NEW)
    cache = llama.cache_for(*contexts, assembly=assembly, reader=reader)
    together = llama.generate_batch(prompts, sampling, cache=cache)
    for prompt, context, tokens in zip(prompts, contexts, together, strict=True):
        alone = llama.cache_for(context, assembly=assembly, reader=reader)
        assert llama.generate(*prompt, sampling, cache=alone) == tokens
    without = llama.cache_for(*contexts, assembly=assembly)
    assert llama.generate_batch(prompts, sampling, cache=without) != together


def test_a_batch_of_which_only_some_need_the_reader_is_refused(llama: BlockModel) -> None:
    contexts = [encoded(llama, BLOCKS[:count]) for count in (1, 2)]
    with pytest.raises(ValueError, match="Answer them in two batches"):
        llama.cache_for(*contexts, reader=trained(llama))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_forward_that_is_broken_off_leaves_no_reader_behind(
    llama: BlockModel, error: type[BaseException]
) -> None:
    context, reader = encoded(llama, BLOCKS), trained(llama)
    layer: Any = llama.hf_model.model.layers[0].mlp
    states = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        before = layer(states)

    def fail(*_: Any) -> None:
        raise error("in the middle")

    handle = llama.hf_model.model.layers[1].register_forward_hook(fail)
    for run in (logits, answer):
        with pytest.raises(error, match="in the middle"):
            run(llama, reader, context)
    handle.remove()
    with torch.inference_mode():
        assert torch.equal(layer(states), before)


# -- beside the rest of the model ------------------------------------------------------------


@pytest.mark.skipif(not _is_available(), reason="nothing packs here")
def test_packed_weights_take_readers_as_plain_ones_do() -> None:
    packed, plain = block_model(), block_model(pack_weights=False)
    assert "forward" in vars(packed.hf_model.model.layers[0].self_attn.q_proj)
    context, reader = encoded(plain, BLOCKS), trained(plain)
    found, expected = (logits(model, reader, context) for model in (packed, plain))
    assert relative_error(found, expected) <= CLOSE


def test_recorded_graphs_are_not_replayed_with_a_reader(llama: BlockModel) -> None:
    context, reader = encoded(llama, BLOCKS), trained(llama)
    stock, adapted = (answer(llama, one, context, "relay") for one in (None, reader))
    recorder = LogRecorder()
    record_graphs(llama.hf_model, recorder)
    assert answer(llama, reader, context, "relay") == adapted
    assert recorder.replayed == 0
    for one, expected in ((None, stock), (reader, adapted), (None, stock)):
        assert answer(llama, one, context, "relay") == expected
    assert recorder.replayed > NEW


def test_a_copy_of_a_model_with_hooks_takes_readers_too(llama: BlockModel) -> None:
    context, reader = encoded(llama, BLOCKS), trained(llama)
    expected = logits(llama, reader, context)
    other = BlockModel(copy.deepcopy(llama.hf_model), tiny_tokenizer())
    assert torch.equal(logits(other, reader, context), expected)


def test_hooks_are_installed_once_and_come_back_when_somebody_removes_them(
    llama: BlockModel,
) -> None:
    context, reader = encoded(llama, BLOCKS), trained(llama)
    expected = logits(llama, reader, context)
    for _ in range(3):
        reader.attach(llama.hf_model)
    layer: Any = llama.hf_model.model.layers[0].self_attn.q_proj
    assert len(layer._forward_hooks) == 1
    layer._forward_hooks.clear()
    assert torch.equal(logits(llama, reader, context), expected)


def test_hooks_keep_neither_readers_nor_models() -> None:
    model = block_model()
    context, reader = encoded(model, BLOCKS), trained(model)
    answer(model, reader, context, "relay")
    matrix = weakref.ref(next(reader.parameters()))
    weight = weakref.ref(model.hf_model.lm_head.weight)
    gc.disable()
    try:
        del reader
        assert matrix() is None  # at once: no cycle holds it
    finally:
        gc.enable()
    kept = trained(model)
    kept.attach(model.hf_model)
    del model, context
    gc.collect()
    assert weight() is None
    assert kept.layers


def test_gradients_are_those_of_peft(llama: BlockModel, tmp_path: Path) -> None:
    """By the same loss on the final block, over the stock model's keys and values."""
    context, reader = encoded(llama, BLOCKS), trained(llama)
    reader.save(tmp_path / "reader", {"fingerprint": llama.fingerprint})
    for matrix in reader.parameters():
        matrix.requires_grad_(True)
    adapted: Any = PeftModel.from_pretrained(
        tiny_model("llama"), str(tmp_path / "reader"), is_trainable=True
    )
    reader.attach(llama.hf_model)
    for parameter in llama.hf_model.parameters():
        parameter.requires_grad_(False)
    for hf_model in (llama.hf_model, adapted):
        cache: Any = llama.cache_for(context, reader=reader)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        out = hf_model(input_ids=FINAL, past_key_values=cache, use_cache=True).logits
        out.log_softmax(-1)[0, :, 5].sum().backward()
    theirs = dict(adapted.named_parameters())
    assert len(reader.layers) == 21
    for path, lora in reader.layers.items():
        for name, matrix in (("lora_A", lora.down), ("lora_B", lora.up)):
            expected = theirs[f"base_model.model.{path}.{name}.default.weight"].grad
            assert matrix.grad is not None
            assert expected is not None
            assert relative_error(matrix.grad, expected) <= 10 * CLOSE


# -- loading by path -------------------------------------------------------------------------


def test_a_reader_is_read_once_while_its_files_stay(llama: BlockModel, tmp_path: Path) -> None:
    folder = tmp_path / "reader"
    metadata = {"fingerprint": llama.fingerprint}
    trained(llama, 1).save(folder, metadata)
    first = llama.load_reader(folder)
    assert llama.load_reader(str(folder)) is first
    trained(llama, 2).save(folder, metadata)
    second = llama.load_reader(folder)
    assert second.digest == trained(llama, 2).digest != first.digest


def test_old_readers_are_let_go(llama: BlockModel, tmp_path: Path) -> None:
    trained(llama, targets=["q_proj"]).save(tmp_path / "0", {"fingerprint": llama.fingerprint})
    first = weakref.ref(llama.load_reader(tmp_path / "0"))
    for index in range(1, 9):
        copied = tmp_path / str(index)
        copied.mkdir()
        for path in (tmp_path / "0").iterdir():
            (copied / path.name).write_bytes(path.read_bytes())
        assert first() is not None
        llama.load_reader(copied)
    gc.collect()
    assert first() is None


def test_a_reader_for_a_model_of_other_weights_is_refused(
    llama: BlockModel, tmp_path: Path
) -> None:
    trained(llama).save(tmp_path / "reader", {"fingerprint": llama.fingerprint})
    other = BlockModel(tiny_model("llama", seed=1), tiny_tokenizer())
    with pytest.raises(ValueError, match=f"made for a model of fingerprint {llama.fingerprint}"):
        other.load_reader(tmp_path / "reader")
    (tmp_path / "reader" / "reader.json").unlink()
    assert len(other.load_reader(tmp_path / "reader").layers) == 21  # as any adapter of PEFT
