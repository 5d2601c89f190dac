"""Relay attention in one kernel, and its CUDA graphs.

The interpreter reads bfloat16 through stored addresses incorrectly, so these tests use float16.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.attention import device_relay
from blockattn_rag.attention.device_relay import DeviceRelay
from blockattn_rag.attention.kernels import AttentionInputs
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import Context, place
from blockattn_rag.kv.rope import RotaryLayout, relative_error, rotate
from blockattn_rag.model import BlockModel, graphs, relay_attention
from blockattn_rag.model.encoding import EncodeRequest, encode_batch
from blockattn_rag.model.probe import LOGITS
from blockattn_rag.model.relay_attention import enable_relay
from blockattn_rag.model.sampling import Sampling

HALF = torch.float16
CPU = torch.device("cpu")
VOCABULARY = 64
ROUNDING = 2e-3
"""Maximum relative error of float16 results."""


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(HALF)


def block(heads: int, tokens: int, size: int, seed: int) -> BlockKV:
    keys, values = random(heads, tokens, size, seed=seed), random(heads, tokens, size, seed=-seed)
    return BlockKV((keys,), (values,), torch.arange(tokens), "model", str(seed), "")


def expected_attention(
    query: Tensor, context: Context, tail: tuple[Tensor, Tensor], layout: RotaryLayout
) -> Tensor:
    """Compute attention over copied and rotated blocks in float64."""
    keys, values = [], []
    for kv, _, shift in context.blocks:
        cos, sin = layout.cos_sin(shift, CPU)
        moved = kv.keys[0].double()
        keys.append(rotate(moved, cos.double(), sin.double(), layout) if shift else moved)
        values.append(kv.values[0].double())
    group = query.shape[1] // tail[0].shape[1]
    key, value = (
        torch.cat([*states, own[0].double()], dim=1).repeat_interleave(group, dim=0)
        for states, own in ((keys, tail[0]), (values, tail[1]))
    )
    rows, columns = query.shape[2], key.shape[1]
    seen = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
    scores = query[0].double() @ key.mT / math.sqrt(query.shape[3])
    return scores.masked_fill(~seen, -math.inf).softmax(dim=-1) @ value


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "rotary", "pairing"),
    [
        (4, 2, 64, 64, "half"),
        (3, 1, 80, 80, "interleaved"),
        (2, 2, 96, 48, "half"),
        (2, 1, 32, 16, "interleaved"),
        (4, 2, 32, 0, "half"),
    ],
)
@pytest.mark.parametrize(
    ("blocks", "before", "tokens"),
    [([], 0, 3), ([1], 0, 1), ([5, 300, 1, 64], 7, 40), ([257], 260, 1)],
)
def test_attention_equals_attention_over_rotated_copies(
    heads: int,
    kv_heads: int,
    size: int,
    rotary: int,
    pairing: Any,
    blocks: list[int],
    before: int,
    tokens: int,
) -> None:
    layout = RotaryLayout(100.0 ** (-torch.arange(0, rotary, 2) / max(rotary, 1)), pairing)
    relay = DeviceRelay([layout], (kv_heads, size, HALF), CPU, programs=8)
    context = place([block(kv_heads, n, size, seed) for seed, n in enumerate(blocks, start=1)])
    assert relay.reads(context)
    relay.load(context)
    tail = tuple(random(1, kv_heads, before + tokens, size, seed=s) for s in (91, 92))
    for start, end in ((0, before), (before, before + tokens)):
        if start < end:
            relay.begin(start, end - start)
            relay.write(0, *(states[:, :, start:end] for states in tail))
    query = random(1, heads, tokens, size, seed=93)
    found = relay.attend(0, AttentionInputs(query, *tail, 1 / math.sqrt(size)))
    expected = expected_attention(query, context, (tail[0], tail[1]), layout)
    assert found.dtype == HALF
    assert relative_error(found[0].double(), expected) <= ROUNDING


def test_unreadable_blocks_are_refused() -> None:
    layout = RotaryLayout(torch.ones(8), "half")
    relay = DeviceRelay([layout], (2, 16, HALF), CPU, programs=4)
    kv = block(2, 5, 16, seed=1)
    assert relay.reads(place([kv]))
    transposed = random(2, 16, 5, seed=1).mT
    others = [
        BlockKV((kv.keys[0].float(),), kv.values, kv.token_ids, "", "", ""),
        BlockKV((transposed,), kv.values, kv.token_ids, "", "", ""),
        BlockKV((random(2, 6, 16, seed=1)[:, 1:],), kv.values, kv.token_ids, "", "", ""),
        kv.quantized(),
    ]
    assert [relay.reads(place([kv, other])) for other in others] == [False] * 4
    assert not relay.reads(place([kv] * 2048))


# -- in a model ------------------------------------------------------------------------------------


def recorded(compute: Callable[[], Tensor], device: torch.device, pool: Any) -> graphs.Recording:
    """Stand-in for a CUDA graph that repeats the computation with the same tensors."""
    result = compute().clone()
    return graphs.Recording(lambda: result.copy_(compute()), result)


def llama(tokenizer: Any) -> BlockModel:
    """A float16 Llama whose attention is far from uniform."""
    make: Any = LlamaConfig
    config = make(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    factory: Any = AutoModelForCausalLM
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        hf_model = factory.from_config(config, dtype=HALF).eval()
        for parameter in hf_model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return BlockModel(hf_model, tokenizer, pack_weights=False)


def with_runner(monkeypatch: pytest.MonkeyPatch, model: BlockModel) -> BlockModel:
    """The model with a runner for single requests that has a small tail."""
    monkeypatch.setattr(graphs, "record", recorded)
    monkeypatch.setattr(device_relay, "TAIL_TOKENS", 48)
    assert model.supports_relay
    enable_relay(model.hf_model)
    outline = model.profile.layer_outlines[0][0]
    relay = DeviceRelay(model.profile.layouts, outline, CPU, programs=4)
    vars(model)["graph_runner"] = graphs.GraphRunner(model.hf_model, relay)
    return model


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> BlockModel:
    return with_runner(monkeypatch, llama(tokenizer))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0")


def ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (count,), generator=generator).tolist()


def context_of(model: BlockModel, *lengths: int) -> Context:
    requests = [EncodeRequest(ids(n, seed), str(seed), "") for seed, n in enumerate(lengths)]
    return place(encode_batch(model.hf_model, requests, "", model.profile))


def close(found: Tensor, expected: Tensor) -> bool:
    return relative_error(found.float(), expected.float()) <= LOGITS[HALF]


def assert_equals_copy(model: BlockModel, context: Context, *steps: list[int]) -> Any:
    """Compare the logits after each step with the copy path. Returns the cache of the runner."""
    found, expected = (model.cache_for(context, assembly=path) for path in ("relay", "copy"))
    assert isinstance(found, graphs.GraphCache)
    for step in steps:
        new = torch.tensor([step])
        assert close(model.next_logits(new, found), model.next_logits(new, expected))
    return found


@pytest.mark.parametrize("lengths", [(5, 300, 40), (7,), (33, 1, 1, 64)])
def test_graphs_for_any_context_equal_the_copy_path(
    model: BlockModel, lengths: tuple[int, ...]
) -> None:
    for seed, tokens in enumerate((9, 20, 12)):  # 12 replays the graph captured for 9
        assert_equals_copy(model, context_of(model, *lengths), ids(tokens, seed), [3], [5])


def test_answers_equal_those_of_the_copy_path(model: BlockModel) -> None:
    for seed in range(2):
        context = context_of(model, 20 + seed, 30, 1)
        for extra in ({}, {"num_beams": 3}, {"output_scores": True}):
            sampling = Sampling(max_new_tokens=6, extra=extra)
            answers = [
                model.generate(
                    context.token_ids,
                    ids(11, seed),
                    sampling,
                    cache=model.cache_for(context, assembly=assembly),
                )
                for assembly in ("relay", "copy")
            ]
            assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "options", [{}, {"do_sample": False}, {"do_sample": True}, {"num_beams": 2}], ids=str
)
def test_a_question_without_passages_is_replayed_if_it_fills_the_cache_in_order(
    monkeypatch: pytest.MonkeyPatch, model: BlockModel, options: dict[str, Any]
) -> None:
    caches: list[Any] = []
    cache_for = model.cache_for

    def keep(*contexts: Context, **ways: Any) -> Any:
        caches.append(cache_for(*contexts, **ways))
        return caches[-1]

    monkeypatch.setattr(model, "cache_for", keep)
    BlockAttentionEngine(model, "memory:").generate(["t1"], max_new_tokens=2, **options)
    assert [isinstance(cache, graphs.GraphCache) for cache in caches] == (
        [] if "num_beams" in options else [True]
    )


def test_graphs_are_captured_again_when_the_tail_grows(model: BlockModel) -> None:
    runner: Any = model.graph_runner
    room, first = runner.relay.room, ids(16, 1)
    assert_equals_copy(model, context_of(model, 12), first, ids(room - 8, 2), first, first)
    assert runner.relay.room > room


def test_a_second_cache_does_not_affect_the_first_one(model: BlockModel) -> None:
    contexts = context_of(model, 12, 9), context_of(model, 30)
    question, more = torch.tensor([ids(6, 1)]), torch.tensor([[4]])
    caches = [model.cache_for(context, assembly="relay") for context in contexts[:1]]
    model.next_logits(question, caches[0])
    caches.append(model.cache_for(contexts[1], assembly="relay"))
    model.next_logits(question, caches[1])
    for context, cache in zip(contexts, caches, strict=True):
        copied = model.cache_for(context, assembly="copy")
        model.next_logits(question, copied)
        assert close(model.next_logits(more, cache), model.next_logits(more, copied))


def test_states_move_to_and_from_the_tail(model: BlockModel) -> None:
    context = context_of(model, 12, 9)
    whole: Any = model.cache_for(context, assembly="relay")
    model.next_logits(torch.tensor([ids(8, 1)]), whole)
    states = whole.tail_states(8)
    again: Any = model.cache_for(context, assembly="relay")
    again.append(states, 5)
    rest = torch.tensor([ids(8, 1)[5:]])
    copied = model.cache_for(context, assembly="copy")
    expected = model.next_logits(torch.tensor([ids(8, 1)]), copied)
    assert close(model.next_logits(rest, again), expected)
    assert all(states.shape[2] == 8 for layer in whole.tail_states(8) for states in layer)


def test_a_forward_that_cannot_be_captured_runs_without_a_graph(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, model: BlockModel
) -> None:
    def failing(*_: Any) -> graphs.Recording:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "record", failing)
    with caplog.at_level(logging.WARNING, "blockattn_rag"):
        assert_equals_copy(model, context_of(model, 12, 9), ids(6, 1))
    assert "not permitted when stream is capturing" in caplog.text


def test_a_copy_of_the_model_has_its_own_forward(model: BlockModel) -> None:
    other = copy.deepcopy(model.hf_model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    question = torch.tensor([ids(6, 1)])
    with torch.inference_mode():
        assert not other(input_ids=question).logits.any()
        assert model.hf_model(input_ids=question).logits.any()


class Wrapped(torch.nn.Module):
    """Wrapper like ``PeftModel``, whose ``generate`` is that of the inner model."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def test_the_model_inside_a_wrapper_uses_the_runner(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    wrapped: Any = Wrapped(llama(tokenizer).hf_model).eval()
    model = with_runner(monkeypatch, BlockModel(wrapped, tokenizer, pack_weights=False))
    context = context_of(model, 12, 9)
    found, expected = (
        model.generate(
            context.token_ids,
            ids(11, 1),
            Sampling(max_new_tokens=6),
            cache=model.cache_for(context, assembly=assembly),
        )
        for assembly in ("relay", "copy")
    )
    assert found == expected


def test_padding_has_no_positions_after_the_question(model: BlockModel) -> None:
    positions: list[int] = []
    context = context_of(model, 12, 9)
    rotary: Any = model.hf_model.model.rotary_emb
    rotary.register_forward_pre_hook(
        lambda _, __, kwargs: positions.append(int(kwargs["position_ids"].max())),
        with_kwargs=True,
    )
    for _ in range(2):
        model.next_logits(torch.tensor([ids(6, 1)]), model.cache_for(context, assembly="relay"))
    assert set(positions) == {12 + 9 + 6 - 1}


@pytest.mark.parametrize("kind", ["gradients", "labels", "inputs_embeds", "token_type_ids"])
def test_only_forwards_of_token_ids_use_the_runner(model: BlockModel, kind: str) -> None:
    context, question = context_of(model, 12, 9), torch.tensor([ids(6, 1)])
    cache: Any = model.cache_for(context, assembly="relay")
    inputs: dict[str, Any] = {
        "gradients": {"input_ids": question},
        "labels": {"input_ids": question, "labels": question},
        "inputs_embeds": {"inputs_embeds": model.hf_model.get_input_embeddings()(question)},
        # Tensors among other arguments are passed on.
        "token_type_ids": {
            "input_ids": question,
            "logits_to_keep": 1,
            "token_type_ids": torch.zeros_like(question),
        },
    }[kind]
    with torch.enable_grad() if kind == "gradients" else torch.inference_mode():
        out = model.hf_model(**inputs, past_key_values=cache, use_cache=True)
    assert (cache.runner is None) == (kind != "token_type_ids")
    assert out.logits.requires_grad == (kind == "gradients")
    expected = model.next_logits(question, model.cache_for(context, assembly="copy"))
    assert close(out.logits[0, -1].detach(), expected)


def test_memory_of_a_long_answer_is_freed(model: BlockModel) -> None:
    relay: Any = model.graph_runner.relay if model.graph_runner else None
    context = context_of(model, 12)
    assert_equals_copy(model, context, ids(60, 1))
    assert relay.room > 48
    assert_equals_copy(model, context, ids(6, 1))
    assert relay.room == 48


def test_int8_blocks_are_copied(monkeypatch: pytest.MonkeyPatch, model: BlockModel) -> None:
    vars(model)["has_causal_kernel"] = True
    plain = context_of(model, 12)
    small = place([plain.blocks[0].kv.quantized()])
    assert model.choose_assembly("auto", 5, [plain]) == "relay"
    assert model.choose_assembly("auto", 5, [small]) == "copy"
    assert model.choose_assembly("auto", 5, [plain, small]) == "relay"


@pytest.mark.parametrize("kind", ["right", "constant", "failing"])
def test_only_an_exact_runner_is_used(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any, kind: str
) -> None:
    def constant(compute: Callable[[], Tensor], *_: Any) -> graphs.Recording:
        return graphs.Recording(lambda: None, compute().clone())

    def failing(*_: Any, **__: Any) -> Tensor:
        raise OSError("no C compiler")

    monkeypatch.setattr(graphs, "record", constant if kind == "constant" else recorded)
    if kind == "failing":
        monkeypatch.setattr("blockattn_rag.attention.relay_kernel.attend_blocks", failing)
    monkeypatch.setattr(relay_attention, "takes_flash", lambda *_: True)
    properties = SimpleNamespace(multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    model = llama(tokenizer)
    assert model.supports_relay
    runner = relay_attention.graph_runner(model.hf_model, model.profile)
    assert (runner is not None) == (kind == "right")
