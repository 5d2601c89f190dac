"""Recomputed tokens are chosen by the question's attention, and equal a dense forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from blockattn_rag import BlockAttentionEngine, Recipe
from blockattn_rag.check.model import placed_context
from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.model import BlockModel
from blockattn_rag.model.recompute import attention_to_context, recompute
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.formats import CHAT, Passage
from tests.model.dense import dense_attention, dense_logits
from tests.model.miniatures import ASSEMBLIES, logits_after
from tests.models import tiny_model, tiny_tokenizer

BLOCKS = [[3, 4, 5], [6, 7, 8, 9, 10, 11, 12], [13, 14, 15, 16, 17], [18, 19, 20]]
CONTEXT, FINAL = BLOCKS[:-1], BLOCKS[-1]
IS_PASSAGE = [False, True, True]
NUM = sum(map(len, CONTEXT))


def model_of(family: str) -> BlockModel:
    if family == "multi-query":
        return BlockModel(tiny_model("llama", num_key_value_heads=1), tiny_tokenizer())
    return BlockModel(tiny_model(family), tiny_tokenizer())


def context_of(model: BlockModel, blocks: Sequence[list[int]] = CONTEXT) -> Any:
    return placed_context(model, [*blocks])


class Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the number of elements of the largest tensor, and the number of scores that fused
    attention computes."""

    largest = scores = 0

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        if "flash_attention" in str(func):
            query, key = args[:2]
            self.scores += query[..., 0].numel() * key.shape[2]
        return result


@pytest.mark.parametrize(
    ("family", "share"),
    [
        *(("llama", share) for share in (0.1, 0.3, 0.75, 1.0)),
        *((family, 0.3) for family in ("multi-query", "qwen3", "gemma", "glm", "gpt_neox")),
    ],
)
def test_recomputed_tokens_equal_one_dense_forward(family: str, share: float) -> None:
    check_dense(model_of(family), family, share)


@pytest.mark.parametrize(
    "limits",
    [{"_MOST_ROWS": 1}, {"_MOST_ROWS": 3}, {"MOST_SCORES": 1}, {"MOST_SCORES": 30}],
    ids=str,
)
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_chunks_do_not_change_the_result(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], share: float
) -> None:
    for name, limit in limits.items():
        monkeypatch.setattr(f"blockattn_rag.model.chosen_attention.{name}", limit)
    check_dense(model_of("llama"), "llama", share)


@pytest.mark.parametrize("share", [0.75, 1.0])
def test_runs_of_tokens_use_a_causal_kernel(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    rows: list[int] = []

    def attend_causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Stand-in for the GPU kernel."""
        rows.append(query.shape[2])
        key, value = (one.repeat_interleave(2, dim=1) for one in (key, value))
        scores = query @ key.mT * scale
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value

    monkeypatch.setattr(BlockModel, "has_causal_kernel", True)
    for module in ("chosen_attention", "relay_attention"):
        monkeypatch.setattr(f"blockattn_rag.model.{module}.attend_causal", attend_causal)
    monkeypatch.setattr("blockattn_rag.model.chosen_attention._MOST_ROWS", 2)
    model = model_of("llama")
    recompute(model, context_of(model), IS_PASSAGE, FINAL, share)
    assert max(rows) == 12 if share == 1 else 1 < max(rows) <= 9
    check_dense(model, "llama", share)


def check_dense(model: BlockModel, family: str, share: float) -> None:
    """Compare the chosen tokens and the logits after the question with dense forward passes."""
    attention = dense_attention(model_of(family), BLOCKS)
    found = attention_to_context(model, context_of(model), FINAL)
    torch.testing.assert_close(found, attention, rtol=1e-4, atol=1e-5)
    count = round(share * 12)
    attention[: len(CONTEXT[0])] = -1
    chosen = sorted(attention.topk(count).indices.tolist())
    context, recomputed = recompute(model, context_of(model), IS_PASSAGE, FINAL, share)
    assert recomputed == chosen
    assert context.token_ids == [token for block in CONTEXT for token in block]
    expected = dense_logits(model, BLOCKS, chosen)
    for assembly in ASSEMBLIES:
        logits = logits_after(model, context, FINAL, assembly)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_cost_grows_no_faster_than_in_full_mode() -> None:
    tokens, passage = 3000, 200
    model = model_of("llama")
    rows = torch.arange(tokens).remainder(250).reshape(-1, passage).tolist()
    context = context_of(model, rows)
    with Work() as work:
        recompute(model, context, [True] * len(rows), FINAL, 1.0)
    # Full mode computes half of all scores of all layers and heads.
    assert work.scores < 0.7 * 3 * 4 * tokens**2
    assert work.largest < 1000 * tokens  # a complete mask would have 3000 per token


def test_tokens_with_equal_attention_are_chosen_in_order() -> None:
    hf_model = tiny_model("llama")
    with torch.no_grad():
        for name, parameter in hf_model.named_parameters():
            if "q_proj" in name:
                parameter.zero_()
    model = BlockModel(hf_model, tiny_tokenizer())
    context = context_of(model, [[3], *[[4 + number] * 10 for number in range(12)]])
    _, chosen = recompute(model, context, [False, *[True] * 12], FINAL, 0.25)
    assert chosen == [*range(1, 31)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_change_the_scores(dtype: torch.dtype) -> None:
    model = model_of("llama")
    context = context_of(model)
    expected = attention_to_context(model, context, FINAL)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = attention_to_context(model, context, FINAL)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("blocks", [CONTEXT, CONTEXT[:1]], ids=["several blocks", "one block"])
def test_stored_blocks_and_the_models_attention_are_unchanged(blocks: list[list[int]]) -> None:
    model = model_of("llama")
    context = context_of(model, blocks)
    before = [[keys.clone() for keys in block.kv.keys] for block in context.blocks]
    expected = logits_after(model, context, FINAL)
    _, chosen = recompute(model, context, [True] * len(blocks), FINAL, 0.5)
    assert chosen
    for block, keys in zip(context.blocks, before, strict=True):
        assert all(map(torch.equal, block.kv.keys, keys))
    assert torch.equal(expected, logits_after(model, context, FINAL))


def test_without_tokens_to_recompute_the_context_is_returned() -> None:
    model = model_of("llama")
    context = context_of(model)
    assert recompute(model, context, IS_PASSAGE, FINAL, 0.01) == (context, [])
    assert recompute(model, context, [False] * 3, FINAL, 1.0) == (context, [])


def test_blocks_with_other_recomputed_tokens_are_different_blocks() -> None:
    model = model_of("llama")
    choices = [
        recompute(model, context_of(model), is_passage, FINAL, 0.5)[0].blocks[0].kv
        for is_passage in ([False, True, False], [False, False, True])
    ]
    assert choices[0].digest != choices[1].digest


def test_models_with_custom_attention_code_are_refused() -> None:
    hf_model = tiny_model("falcon", new_decoder_architecture=True, num_kv_heads=2, alibi=False)
    with pytest.raises(UnsupportedModelError, match="use a recipe with recompute=0"):
        BlockAttentionEngine(BlockModel(hf_model, tiny_tokenizer()), recipe=Recipe(recompute=0.5))


def test_models_in_training_mode_are_refused() -> None:
    model = model_of("llama")
    context = context_of(model)
    model.hf_model.train()
    with pytest.raises(ValueError, match="training mode"):
        recompute(model, context, IS_PASSAGE, FINAL, 0.5)


@pytest.fixture(scope="module")
def bundled() -> BlockModel:
    return BlockAttentionEngine.from_pretrained("bundled", dtype="float32").model


@pytest.fixture
def engine(bundled: BlockModel) -> BlockAttentionEngine:
    """A new engine, without blocks and tails from other tests."""
    return BlockAttentionEngine(bundled, recipe="none")


@pytest.fixture
def prompt(engine: BlockAttentionEngine) -> BlockPrompt:
    passages = [
        Passage("Halden Tower", "Halden Tower is 214 metres high."),
        Passage("Vell Bridge", "Vell Bridge was built in 1907."),
    ]
    tokenizer = engine.model.tokenizer.tokenizer
    return CHAT.prompt("How high is Halden Tower?", passages, tokenizer)


@pytest.mark.parametrize("sink", ["none", "head:4"])
def test_a_larger_share_brings_answers_closer_to_full_mode(
    engine: BlockAttentionEngine, prompt: BlockPrompt, sink: str
) -> None:
    answer = engine.generate(prompt, mode="full", max_new_tokens=6)
    full = engine.answer_logits(prompt, answer.token_ids, mode="full")
    logits = {
        share: engine.answer_logits(prompt, answer.token_ids, recipe=Recipe(sink, recompute=share))
        for share in (0.0, 0.5, 1.0)
    }
    torch.testing.assert_close(logits[1.0], full, rtol=1e-4, atol=1e-4)
    errors = [float((one - full).abs().max()) for one in logits.values()]
    assert errors[0] > errors[1] > errors[2]
    found = engine.generate(prompt, recipe=Recipe(sink, recompute=1.0), max_new_tokens=6)
    assert found.token_ids == answer.token_ids


@pytest.mark.parametrize(
    ("blocks", "promote"),
    [(0, 0), (1, 0), (None, 9)],
    ids=["none", "only a system text", "promoted"],
)
def test_prompts_without_passages_recompute_nothing(
    engine: BlockAttentionEngine, prompt: BlockPrompt, blocks: int | None, promote: int
) -> None:
    asked = BlockPrompt(prompt.context[:blocks], prompt.final)
    engine.precompute(asked.context, as_prompt=True, recipe=Recipe("head:4"))
    plain, found = (
        engine.generate(asked, recipe=Recipe("head:4", promote=promote, recompute=share))
        for share in (0.0, 0.5)
    )
    assert found.token_ids == plain.token_ids
    assert found.stats.computed_tokens == plain.stats.computed_tokens


def test_only_passages_that_are_not_promoted_are_recomputed(
    engine: BlockAttentionEngine, prompt: BlockPrompt
) -> None:
    answer = engine.generate(prompt, mode="full", max_new_tokens=6).token_ids
    expected = engine.answer_logits(prompt, answer, mode="full")
    found = engine.answer_logits(prompt, answer, recipe=Recipe(promote=1, recompute=1.0))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_recomputes_from_int8_blocks(engine: BlockAttentionEngine, prompt: BlockPrompt) -> None:
    small = BlockAttentionEngine(engine.model, kv_dtype="int8", recipe=Recipe(recompute=0.5))
    answer = engine.generate(prompt, mode="full", max_new_tokens=6).token_ids
    expected = engine.answer_logits(prompt, answer, recipe=Recipe(recompute=0.5))
    found = small.answer_logits(prompt, answer)
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()
    assert small.generate(prompt, max_new_tokens=2).stats.int8_blocks == len(prompt.context)


def test_batches_and_later_turns_equal_single_answers(
    engine: BlockAttentionEngine, prompt: BlockPrompt
) -> None:
    recipe = Recipe("head:4", recompute=0.3)
    other = BlockPrompt(prompt.context[::-1], prompt.final.replace("high", "old"))
    again = BlockPrompt(prompt.context, prompt.final + " Halden")
    prompts = [prompt, other, prompt, again]
    engine.precompute(prompt.context, as_prompt=True, recipe=recipe)
    single = [
        BlockAttentionEngine(engine.model, engine.store, recipe=recipe).generate(
            one, max_new_tokens=5
        )
        for one in prompts
    ]
    batch = engine.generate_batch(prompts, recipe=recipe, max_new_tokens=5)
    turns = [engine.generate(one, recipe=recipe, max_new_tokens=5) for one in prompts]
    expected = [one.token_ids for one in single]
    assert [one.token_ids for one in batch] == [one.token_ids for one in turns] == expected
    assert {one.stats.reused_tokens for one in (turns[0], turns[2])} == {
        single[0].stats.reused_tokens
    }
