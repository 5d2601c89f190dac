"""A weighted context: on relay and on the copy path, it gives the oracle's logits and tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import pytest
import torch

from blockattn_rag.attention.context_merge import ContextMerge, FixedMerge, LearnedMerge
from blockattn_rag.attention.merge_file import load_merge, save_merge
from blockattn_rag.check.oracle import oracle_generate, oracle_logits
from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.kv.context import Context, Positions, place
from blockattn_rag.kv.rope import relative_error
from blockattn_rag.model import BlockModel, EncodeRequest
from blockattn_rag.model.graphs import record_graphs
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.model.tolerances import LOGITS
from tests.model.families import SUPPORTED
from tests.model.test_graphs import LogRecorder
from tests.model.test_relay_attention import BLOCKS, FINAL_IDS, encoded, random_ids
from tests.models import tiny_model, tiny_tokenizer

Assembly = Literal["relay", "copy"]
NEW = 5
SINK = random_ids(3, 77)
FIXED = {
    "scale": FixedMerge("scale", 0.7, 0.8),
    "bias": FixedMerge("bias", -1.0, 1.2),
    "ape": FixedMerge("ape", 0.8, 0.9),
}
ASSEMBLIES: list[Assembly] = ["relay", "copy"]
assemblies = pytest.mark.parametrize("assembly", ASSEMBLIES)


@lru_cache(maxsize=2)
def model_of(family: str) -> BlockModel:
    kind, config = SUPPORTED[family]
    return BlockModel(tiny_model(kind, **config), tiny_tokenizer())


# Windows, soft caps, attention sinks and attention of its own (falcon) leave no place for a merge.
WEIGHABLE = [
    family
    for family, (kind, config) in SUPPORTED.items()
    if kind not in ("falcon", "gemma2", "gpt_oss") and not config.get("sliding_window")
]


def learned(model: BlockModel) -> LearnedMerge:
    """Random temperatures, biases and shifts for each layer and head."""
    outline = model.profile.token_outline
    kv_heads, size, _ = outline[-1]
    heads, layers = model.config.num_attention_heads, len(outline) // 2
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return LearnedMerge(
        random(layers, heads) * 0.2, random(layers, heads), random(layers, kv_heads, size) * 0.1
    )


def merge_of(form: str, model: BlockModel) -> ContextMerge:
    return learned(model) if form == "learned" else FIXED[form]


def placed(
    model: BlockModel,
    blocks: list[list[int]],
    sink: list[int] = [],  # noqa: B006 -- never written
    positions: Positions = "reordered",
) -> Context:
    requests = [EncodeRequest(ids, str(n), "", sink if n else ()) for n, ids in enumerate(blocks)]
    found = {kv.digest: kv for batch in model.encode(requests) for kv in batch}
    return place([found[request.digest] for request in requests], positions)


def logits_of(
    model: BlockModel, context: Context, assembly: Assembly, merge: ContextMerge | None
) -> torch.Tensor:
    cache = model.cache_for(context, assembly=assembly, merge=merge)
    return model.next_logits(torch.tensor([FINAL_IDS]), cache)


@pytest.mark.parametrize("family", WEIGHABLE)
def test_logits_are_the_oracles_with_every_form(family: str) -> None:
    model = model_of(family)
    assert model.supports_relay
    prompt = [*BLOCKS, FINAL_IDS]
    for sink in ([], SINK):
        context = placed(model, BLOCKS, sink)
        plain = oracle_logits(model.hf_model, prompt, sink)[-1]
        for form in (*FIXED, "learned"):
            merge = merge_of(form, model)
            expected = oracle_logits(model.hf_model, prompt, sink, merge=merge)[-1]
            assert relative_error(expected, plain) > 20 * LOGITS[torch.float32]
            for way in ASSEMBLIES:
                found = logits_of(model, context, way, merge)
                assert relative_error(found, expected) <= LOGITS[torch.float32], (form, way)


@pytest.mark.parametrize("family", WEIGHABLE)
def test_greedy_tokens_are_the_oracles(family: str) -> None:
    model = model_of(family)
    prompt, ends = [*BLOCKS, FINAL_IDS], sorted(model.end_token_ids)
    context = placed(model, BLOCKS, SINK)
    for form in ("bias", "learned"):
        merge = merge_of(form, model)
        expected = oracle_generate(model.hf_model, prompt, 3, ends, SINK, merge=merge)
        for way in ASSEMBLIES:
            cache = model.cache_for(context, assembly=way, merge=merge)
            options = Sampling(max_new_tokens=3)
            found = model.generate(context.token_ids, FINAL_IDS, options, cache=cache)
            assert found == expected, (form, way)


@assemblies
@pytest.mark.parametrize("form", [*FIXED, "learned"])
def test_composite_positions_are_the_oracles(form: str, assembly: Assembly) -> None:
    model = model_of("llama")
    merge = merge_of(form, model)
    context = placed(model, BLOCKS, positions="composite")
    prompt = [*BLOCKS, FINAL_IDS]
    expected = oracle_logits(model.hf_model, prompt, merge=merge, positions="composite")[-1]
    found = logits_of(model, context, assembly, merge)
    assert relative_error(found, expected) <= LOGITS[torch.float32]
    reordered = oracle_logits(model.hf_model, prompt, merge=merge)[-1]
    assert relative_error(reordered, expected) > 1e-2


@assemblies
@pytest.mark.parametrize("form", [*FIXED, "learned"])
def test_a_batch_of_unequal_requests_is_the_oracles(form: str, assembly: Assembly) -> None:
    """The first block of one request stands among the others of another."""
    model = model_of("llama")
    orders = [[0, 1, 2, 3], [3], [2, 0], [1, 1, 0]]
    finals = [FINAL_IDS, FINAL_IDS[:3], FINAL_IDS[2:], FINAL_IDS[:7]]
    prompts = [[BLOCKS[i] for i in order] for order in orders]
    contexts = [encoded(model, blocks) for blocks in prompts] + [place([])]
    finals.append(FINAL_IDS[:5])
    prompts.append([])
    merge = merge_of(form, model)
    cache = model.cache_for(*contexts, assembly=assembly, merge=merge)
    given = [(c.token_ids, f) for c, f in zip(contexts, finals, strict=True)]
    found = model.generate_batch(given, Sampling(max_new_tokens=NEW), cache=cache)
    ends = sorted(model.end_token_ids)
    for answer, blocks, final in zip(found, prompts, finals, strict=True):
        prompt = [*blocks, final]
        assert answer == oracle_generate(model.hf_model, prompt, NEW, ends, merge=merge)


@pytest.mark.parametrize("form", [*FIXED, "learned"])
def test_beams_choose_the_same_tokens_on_both_paths(form: str) -> None:
    model = model_of("llama")
    contexts = [encoded(model, BLOCKS), encoded(model, BLOCKS[:2])]
    given = [(context.token_ids, FINAL_IDS) for context in contexts]
    options = Sampling(max_new_tokens=NEW, extra={"num_beams": 3, "do_sample": False})

    def answers(merge: ContextMerge | None, assembly: Assembly) -> list[list[int]]:
        cache = model.cache_for(*contexts, assembly=assembly, merge=merge)
        return model.generate_batch(given, options, cache=cache)

    merge = merge_of(form, model)
    assert answers(merge, "relay") == answers(merge, "copy")
    alone = [
        model.generate(*prompt, options, cache=model.cache_for(context, merge=merge))
        for prompt, context in zip(given, contexts, strict=True)
    ]
    assert alone == answers(merge, "copy")


@assemblies
def test_a_merge_of_one_is_plain_block_mode(assembly: Assembly) -> None:
    model = model_of("llama")
    context = encoded(model, BLOCKS)
    plain = logits_of(model, context, assembly, None)
    identity = LearnedMerge.identity(3, 4, 2, 8)
    for merge in (FixedMerge("scale", 1.0), FixedMerge("bias", 0), FixedMerge("ape", 1), identity):
        found = logits_of(model, context, assembly, merge)
        assert relative_error(found, plain) <= LOGITS[torch.float32]


@assemblies
@pytest.mark.parametrize("form", [*FIXED, "learned"])
def test_only_ape_answers_otherwise_when_a_key_bias_adds_a_constant_to_all_scores(
    form: str, assembly: Assembly
) -> None:
    """Phi rotates half of each key; a bias in the other half is the same at all distances."""
    logits, plain = [], []
    for size in (0.0, 3.0):
        hf_model = tiny_model("phi", partial_rotary_factor=0.5)
        with torch.no_grad():
            for name, parameter in hf_model.named_parameters():
                if name.endswith("k_proj.bias"):
                    parameter.view(-1, 8)[:, 4:] += size
        model = BlockModel(hf_model, tiny_tokenizer())
        context = encoded(model, BLOCKS)
        logits.append(logits_of(model, context, assembly, merge_of(form, model)))
        plain.append(logits_of(model, context, assembly, None))
    assert relative_error(*plain) <= LOGITS[torch.float32]
    error = relative_error(*logits)
    assert (error > 1e-2) if form == "ape" else (error <= LOGITS[torch.float32])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_training_by_the_copy_path_gives_the_gradients_of_relay_and_of_differences(
    family: str,
) -> None:
    model = model_of(family)
    context = encoded(model, BLOCKS)
    ids = torch.tensor([FINAL_IDS])

    def loss(merge: LearnedMerge, assembly: Assembly) -> torch.Tensor:
        cache = model.cache_for(context, assembly=assembly, merge=merge)
        logits: torch.Tensor = model.hf_model(input_ids=ids, past_key_values=cache).logits
        return logits[0, -1, 7]

    merge = learned(model)
    for tensor in merge.parameters():
        tensor.requires_grad_()
    loss(merge, "copy").backward()  # type: ignore[no-untyped-call]
    step = 1e-2
    for name in ("log_temperature", "bias", "shift"):
        tensor = getattr(merge, name)
        at = (0, *(0 for _ in tensor.shape[1:]))
        ends = []
        for change in (step, -step):
            moved = tensor.detach().clone()
            moved[at] += change
            with torch.no_grad():
                ends.append([loss(replace(merge, **{name: moved}), w) for w in ("copy", "relay")])
        for more, less in zip(*ends, strict=True):
            slope = float(more - less) / (2 * step)
            assert float(tensor.grad[at]) == pytest.approx(slope, rel=2e-2, abs=1e-3)


@pytest.mark.parametrize("family", ["gemma2", "mistral, sliding window", "falcon"])
@assemblies
def test_a_model_whose_attention_cannot_be_replaced_refuses(
    family: str, assembly: Assembly
) -> None:
    model = model_of(family)
    context = encoded(model, BLOCKS)
    with pytest.raises(UnsupportedModelError, match=r"cannot use a merge other than 'none'"):
        model.cache_for(context, assembly=assembly, merge=FIXED["scale"])
    assert model.cache_for(context) is not None


@assemblies
def test_a_file_serves_its_model_and_no_other(tmp_path: Any, assembly: Assembly) -> None:
    model, other = model_of("llama"), BlockModel(tiny_model("llama", seed=5), tiny_tokenizer())
    context = encoded(model, BLOCKS)
    save_merge(learned(model), tmp_path / "a.safetensors", model.fingerprint)
    merge = load_merge(str(tmp_path / "a.safetensors"))
    found = logits_of(model, context, assembly, merge)
    assert torch.equal(found, logits_of(model, context, assembly, learned(model)))
    with pytest.raises(ValueError, match="found a learned merge of the model"):
        other.cache_for(encoded(other, BLOCKS), assembly=assembly, merge=merge)


@assemblies
def test_a_merge_ends_with_its_cache(assembly: Assembly) -> None:
    model = model_of("llama")
    context = encoded(model, BLOCKS)
    before = logits_of(model, context, assembly, None)
    logits_of(model, context, assembly, FIXED["bias"])
    assert torch.equal(logits_of(model, context, assembly, None), before)


def test_recorded_forwards_weigh_the_context() -> None:
    recorded = BlockModel(tiny_model("llama"), tiny_tokenizer())
    recorder = LogRecorder()
    record_graphs(recorded.hf_model, recorder)
    own = model_of("llama")
    context, options = encoded(own, BLOCKS), Sampling(max_new_tokens=NEW)
    for form in (*FIXED, "learned"):
        merge = merge_of(form, own)
        answers = [
            model.generate(
                context.token_ids,
                FINAL_IDS,
                options,
                cache=model.cache_for(context, assembly="relay", merge=merge),
            )
            for model in (own, recorded)
        ]
        assert answers[0] == answers[1]
    assert recorder.replayed > NEW
