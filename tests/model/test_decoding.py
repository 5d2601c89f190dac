"""Generation gives the same tokens as transformers for the same options, also in batches."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.kv.context import Assembly
from blockattn_rag.model import BlockModel
from blockattn_rag.model.decoding import greedy_answers
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.prompts.blocks import BlockPrompt
from tests.engines import outcome, tuned_engine, tuned_model, with_settings
from tests.model.families import SUPPORTED
from tests.models import shared_tiny_llama, tiny_model, tiny_tokenizer

NEW = 10
A, B = "Halden Tower is 214 metres tall.", "It was built in 1931."
PROMPTS = [[A, B, "How tall?"], [B, "When?"], ["No context at all."], [B, A, B, "x"]]

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 3},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "temperature": 1.0, "seed": 4},
    "repetition penalty": {"repetition_penalty": 1.3},
    "no repeated pair": {"no_repeat_ngram_size": 2},
    "least length": {"min_new_tokens": 5},
    "min_p": {"min_p": 0.05, "temperature": 1.5, "seed": 1},
}


@pytest.fixture(scope="module")
def engine() -> BlockAttentionEngine:
    return BlockAttentionEngine(tuned_model())


def transformers_own(model: BlockModel, texts: list[str], options: dict[str, Any]) -> list[int]:
    """Generate with transformers, without this package."""
    rest = dict(options)
    if (seed := rest.pop("seed", None)) is not None:
        torch.manual_seed(seed)
    ids = torch.tensor([model.tokenizer.prompt_ids(BlockPrompt.from_texts(texts)).flat])
    stop = (
        {"stop_strings": rest.pop("stop"), "tokenizer": tiny_tokenizer()} if "stop" in rest else {}
    )
    run: Any = model.hf_model.generate
    output = run(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample="temperature" in rest,
        pad_token_id=258,
        **rest,
        **stop,
    )
    return list(output[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_full_mode_equals_transformers(
    engine: BlockAttentionEngine, options: dict[str, Any]
) -> None:
    for texts, mode in ((["No context."], "block"), (["No context."], "full"), ([A, "Q"], "full")):
        found = engine.generate(texts, mode=mode, max_new_tokens=NEW, **options)  # type: ignore[arg-type]
        assert found.token_ids == transformers_own(engine.model, texts, options)


@pytest.mark.parametrize("assembly", ["copy", "relay"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_one_block_equals_full_attention_with_every_option(
    engine: BlockAttentionEngine, options: dict[str, Any], assembly: Assembly
) -> None:
    engine = with_settings(engine, assembly=assembly)
    found = engine.generate([A, "Q"], max_new_tokens=NEW, **options)
    assert found.token_ids == transformers_own(engine.model, [A, "Q"], options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("mode", ["block", "full"])
def test_batches_equal_single_requests(
    engine: BlockAttentionEngine, options: dict[str, Any], mode: Any
) -> None:
    alone = [engine.generate(p, mode=mode, max_new_tokens=NEW, **options) for p in PROMPTS]
    together = engine.generate_batch(PROMPTS, mode=mode, max_new_tokens=NEW, **options)
    assert [*map(outcome, together)] == [*map(outcome, alone)]


@pytest.mark.parametrize("assembly", ["copy", "relay"])
def test_rows_end_as_in_single_requests(engine: BlockAttentionEngine, assembly: Assembly) -> None:
    engine = with_settings(engine, assembly=assembly)
    free = [engine.generate(p, max_new_tokens=NEW) for p in PROMPTS]
    letter = next(c for answer in free for c in answer.text if c.isascii())
    options: dict[str, Any]
    # Answers are ended by an end token, a letter, or an incomplete character.
    for options in ({"eos_token_id": free[0].token_ids[2]}, {"stop": letter}, {"stop": "\ufffd"}):
        options |= {"max_new_tokens": NEW}
        alone = [engine.generate(p, **options) for p in PROMPTS]
        together = engine.generate_batch(PROMPTS, **options)
        assert [*map(outcome, together)] == [*map(outcome, alone)]
        assert min(len(g.token_ids) for g in alone) < NEW


def test_rows_of_models_with_sliding_windows_run_one_by_one() -> None:
    kind, config = SUPPORTED["mistral, sliding window"]
    model = BlockModel(tiny_model(kind, **config), tiny_tokenizer())
    model.config.block_attention = {"tuned": True}
    engine = BlockAttentionEngine(model)
    assert not model.batches_exactly(Sampling())
    alone = [engine.generate(p, max_new_tokens=4).token_ids for p in PROMPTS]
    assert [g.token_ids for g in engine.generate_batch(PROMPTS, max_new_tokens=4)] == alone


def test_the_generation_config_of_the_model_is_used() -> None:
    hf_model = copy.deepcopy(shared_tiny_llama())
    hf_model.generation_config.repetition_penalty = 1.3
    hf_model.generation_config.num_beams = 2
    model = BlockModel(hf_model, tiny_tokenizer())
    model.config.block_attention = {"tuned": True}
    engine = BlockAttentionEngine(model)
    for mode in ("block", "full"):
        found = engine.generate([A, "Q"], max_new_tokens=NEW, mode=mode)
        assert found.token_ids == transformers_own(model, [A, "Q"], {})
    alone = [engine.generate(p, max_new_tokens=4).token_ids for p in PROMPTS]
    assert [g.token_ids for g in engine.generate_batch(PROMPTS, max_new_tokens=4)] == alone


def test_a_stop_string_with_multi_token_characters_ends_the_answer() -> None:
    from transformers import LogitsProcessor

    text = list("aé🙂 and more".encode())

    class Says(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            done = input_ids.shape[1] - width
            ids = tokenizer(bytes(text).decode(), add_special_tokens=False)["input_ids"]
            scores = torch.full_like(scores, -100.0)
            scores[:, ids[min(done, len(ids) - 1)]] = 100.0
            return scores

    tokenizer: Any = tiny_tokenizer()
    model = BlockModel(shared_tiny_llama(), tokenizer)
    engine = BlockAttentionEngine(model)
    width = len(model.tokenizer.prompt_ids(BlockPrompt.from_texts(["Q"])).flat)
    found = engine.generate(["Q"], max_new_tokens=16, stop=["🙂"], logits_processor=[Says()])
    assert found.text == "aé"
    assert found.finish_reason == "stop"
    assert len(found.token_ids) == 1 + 2 + 4


def test_a_custom_streamer_receives_every_token(engine: BlockAttentionEngine) -> None:
    class Notes(BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    notes = Notes()
    found = engine.generate([A, "Q"], max_new_tokens=NEW, streamer=notes)
    assert notes.tokens[-len(found.token_ids) :] == found.token_ids
    assert notes.ended


def test_custom_stopping_criteria_are_used(engine: BlockAttentionEngine) -> None:
    class AfterThree(StoppingCriteria):
        calls = 0

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return torch.full((len(input_ids),), self.calls == 3)

    found = engine.generate([A, "Q"], max_new_tokens=NEW, stopping_criteria=[AfterThree()])
    assert len(found.token_ids) == 3
    assert found.finish_reason == "stop"


def test_sampling_does_not_change_the_callers_random_state(engine: BlockAttentionEngine) -> None:
    before = torch.get_rng_state()
    engine.generate([A, "Q"], max_new_tokens=3, temperature=1.0, seed=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_options_unknown_to_transformers_are_refused(engine: BlockAttentionEngine) -> None:
    with pytest.raises(ValueError, match="not used by the model"):
        engine.generate([A, "Q"], max_new_tokens=3, no_such_option=1)


def two_questions(engine: BlockAttentionEngine) -> list[tuple[list[int], list[int]]]:
    tokenizer = engine.model.tokenizer
    return [([], tokenizer.final_ids(text, first=True)) for text in ("One?", "Another?")]


def test_batch_streams_tokens_until_it_is_stopped(engine: BlockAttentionEngine) -> None:
    model, prompts = engine.model, two_questions(engine)
    free = model.generate_batch(prompts, Sampling(NEW))
    steps: list[list[int]] = []

    def note(tokens: list[int]) -> list[bool]:
        steps.append(tokens)
        return [False] * len(tokens)

    watched: dict[str, Any] = {"on_tokens": note, "is_cancelled": lambda: len(steps) == 4}
    rows = model.generate_batch(prompts, Sampling(NEW), **watched)
    assert rows == [ids[:4] for ids in free]
    assert [list(row) for row in zip(*steps, strict=True)] == rows
    end = free[0][1]  # ends the first row, which is padded afterwards
    assert end not in free[1]
    steps.clear()
    ending = Sampling(NEW, extra={"eos_token_id": end, "pad_token_id": 3})
    first, _ = model.generate_batch(prompts, ending, **watched)
    assert [step[0] for step in steps] == [*first, 3, 3]


def test_rows_ended_by_the_caller_contain_no_padding(engine: BlockAttentionEngine) -> None:
    model, prompts = engine.model, two_questions(engine)
    free = model.generate_batch(prompts, Sampling(NEW))
    steps: list[list[int]] = []

    def end_first_row(tokens: list[int]) -> list[bool]:
        steps.append(tokens)
        return [len(steps) >= 3, False]

    rows = model.generate_batch(prompts, Sampling(NEW), on_tokens=end_first_row)
    assert rows == [free[0][:3], free[1]]


@pytest.mark.parametrize("mode", ["block", "full"])
@pytest.mark.parametrize("own", [2, None])
def test_an_explicit_end_token_is_used(mode: Literal["block", "full"], own: int | None) -> None:
    engine = tuned_engine()
    varied: dict[str, Any] = {"max_new_tokens": NEW, "mode": mode, "repetition_penalty": 5.0}
    free = engine.generate([A, "Q"], eos_token_id=None, **varied).token_ids
    assert len(set(free[:5])) == 5
    engine.model.hf_model.generation_config.eos_token_id = None if own is None else free[own]
    given = GenerationConfig(eos_token_id=free[4])  # type: ignore[no-untyped-call]
    found = engine.generate([A, "Q"], generation_config=given, **varied)
    assert (found.token_ids, found.finish_reason) == (free[:5], "stop")


TOKENS = [list(b"How tall is Halden Tower?"), list(b"When?")]


def greedy(**config: Any) -> list[list[int]]:
    """Return a model's answers with this generation config, and check that they are greedy."""
    model = BlockModel(copy.deepcopy(shared_tiny_llama()), tiny_tokenizer())
    model.hf_model.generation_config = GenerationConfig(**config)  # type: ignore[no-untyped-call]
    found = greedy_answers(model.hf_model, model.tokenizer.tokenizer, TOKENS, NEW + 2)
    for ids, logits in found:
        assert ids.tolist() == logits.argmax(dim=-1).tolist()
    return [ids.tolist() for ids, _ in found]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return greedy()


@pytest.mark.parametrize(
    "config",
    [
        {"repetition_penalty": 3.0},
        {"no_repeat_ngram_size": 1},
        {"suppress_tokens": list(range(128))},
        {"min_new_tokens": 3, "forced_eos_token_id": 5},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "temperature": 5.0, "top_k": 9, "top_p": 0.9},
        {"max_length": 3, "max_time": 1e-9},
        {"prompt_lookup_num_tokens": 2, "guidance_scale": 2.0},
        {"an_entry_of_somebody": 1, "bos_token_id": 7},
    ],
    ids=lambda config: next(iter(config)),
)
def test_greedy_ignores_generation_config(config: dict[str, Any], plain: list[list[int]]) -> None:
    assert greedy(**config) == plain
