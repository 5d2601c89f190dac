"""Tails: later turns only compute new tokens, and their answers do not change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList

from blockattn_rag.check.oracle import oracle_logits
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.engine.results import Generation
from blockattn_rag.engine.tails import SHARE
from blockattn_rag.kv.rope import relative_error
from blockattn_rag.model import BlockModel
from blockattn_rag.model.probe import LOGITS
from blockattn_rag.prompts.blocks import BlockPrompt
from tests.engines import with_settings
from tests.model.families import SUPPORTED
from tests.models import VOCABULARY, tiny_model, tiny_tokenizer
from tests.recipes import recipe_of

HEAD, A, B = "Answer.", "Halden Tower is 214 metres tall.", "It was built in 1931."
CONTEXT = [HEAD, A, B]
QUESTIONS = ["How tall?", " When was it built?", " Where?"]
NEW = 6
EXACT = LOGITS[torch.float32]

assemblies = pytest.mark.parametrize("assembly", ["relay", "copy"])


LETTERS = 94
"""Number of printable ASCII characters, which are the first tokens of the test tokenizer."""


def readable(model: BlockModel) -> BlockModel:
    """Restrict answers to printable characters: one token each, also in the next prompt."""
    model.config.block_attention = {"tuned": True}
    model.hf_model.generation_config.suppress_tokens = [*range(LETTERS, VOCABULARY)]
    return model


class Logits(LogitsProcessor):
    """Records the logits of ``LETTERS`` for each token of the last answer."""

    def __init__(self) -> None:
        self._seen: list[Tensor] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self._seen.append(scores[0, :LETTERS].clone())
        return scores

    def taken(self) -> Tensor:
        seen, self._seen = self._seen, []
        return torch.stack(seen)


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> Logits:
    """Record logits of all answers. The option ``logits_processor`` would disable tails."""
    seen, original = Logits(), GenerationMixin.generate

    def generate(*args: Any, **given: Any) -> Any:
        return original(*args, **{**given, "logits_processor": LogitsProcessorList([seen])})

    monkeypatch.setattr(GenerationMixin, "generate", generate)
    return seen


@pytest.fixture(scope="module")
def model() -> BlockModel:
    return readable(BlockModel(tiny_model(), tiny_tokenizer()))


@pytest.fixture
def plain(model: BlockModel) -> BlockAttentionEngine:
    """An engine without tails."""
    return BlockAttentionEngine(model, resident_bytes=0)


def kept(engine: BlockAttentionEngine) -> list[Any]:
    return engine._runner._tails._kept


def turns(
    engine: BlockAttentionEngine, context: list[str], name: str = "", **options: Any
) -> Iterator[tuple[list[str], Generation]]:
    """Yield the prompts and answers of a conversation. Each prompt contains the earlier answers."""
    final = name
    for question in QUESTIONS:
        final += question
        answer = engine.generate([*context, final], max_new_tokens=NEW, **options)
        yield [*context, final], answer
        final += answer.text


def new_tokens(turn: int) -> int:
    """Minimum of computed tokens: the question, and the last token of the previous answer."""
    return len(QUESTIONS[turn]) + (turn > 0)


@assemblies
@pytest.mark.parametrize("context", [[], [HEAD], CONTEXT], ids=len)
def test_a_turn_only_computes_new_tokens_and_gives_the_same_answer(
    engine: BlockAttentionEngine,
    plain: BlockAttentionEngine,
    logits: Logits,
    assembly: Any,
    context: list[str],
) -> None:
    engine, plain = (
        with_settings(one, assembly=assembly, resident_bytes=n)
        for one, n in ((engine, 1 << 30), (plain, 0))
    )
    for turn, (prompt, answer) in enumerate(turns(engine, context)):
        found = logits.taken()
        expected = plain.generate(prompt, max_new_tokens=NEW)
        assert answer.token_ids == expected.token_ids
        assert relative_error(found, logits.taken()) <= EXACT
        ids = plain.model.tokenizer.prompt_ids(BlockPrompt.from_texts(prompt))
        oracle = oracle_logits(plain.model.hf_model, [*ids.context, ids.final])[-1]
        assert relative_error(found[0], oracle[:LETTERS]) <= EXACT
        assert answer.stats.prompt_tokens == expected.stats.prompt_tokens == len(ids.flat)
        if turn:
            assert answer.stats.computed_tokens == new_tokens(turn)
            assert expected.stats.computed_tokens == len(ids.final)
    assert len(kept(engine)) == 1  # a longer tail replaces the one that it extends
    assert not kept(plain)


def test_a_changed_turn_is_recomputed(
    engine: BlockAttentionEngine, plain: BlockAttentionEngine
) -> None:
    answer = engine.generate([*CONTEXT, "Who?"], max_new_tokens=NEW)
    for rest in (f"{answer.text[:3]} Or where?", " Tell."):
        prompt = [*CONTEXT, "Who?" + rest]
        found = engine.generate(prompt, max_new_tokens=NEW)
        assert found.token_ids == plain.generate(prompt, max_new_tokens=NEW).token_ids
        common = 3 if answer.text[:3] in rest else 0
        assert found.stats.computed_tokens == len(rest) - common
    assert len(kept(engine)) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"context": [HEAD, B, A]},
        {"context": [HEAD, A]},
        {"context": [A, HEAD, B]},
        {"recipe": "head:4"},
        {"recipe": Recipe(positions="composite")},
        {"recipe": "adapter"},
    ],
    ids=str,
)
def test_a_different_context_recipe_or_assembly_uses_no_tail(
    engine: BlockAttentionEngine, plain: BlockAttentionEngine, change: dict[str, Any]
) -> None:
    options: dict[str, Any] = dict(change)
    context = options.pop("context", CONTEXT)
    if options.get("recipe") == "adapter":
        options["recipe"] = recipe_of(engine.model)
    engine.generate([*context, "~"], max_new_tokens=1, **options)  # stores the blocks
    engine.generate([*CONTEXT, "How tall is it?"], max_new_tokens=NEW)
    prompt = [*context, "How tall is it?"]
    found = engine.generate(prompt, max_new_tokens=NEW, **options)
    assert found.stats.computed_tokens == len(prompt[-1])
    assert found.token_ids == plain.generate(prompt, max_new_tokens=NEW, **options).token_ids
    assert engine.generate(prompt, max_new_tokens=NEW, **options).stats.computed_tokens == 1


def test_autocast_leaves_no_tail(engine: BlockAttentionEngine) -> None:
    assert engine.model.fingerprint  # computed before autocast, which does not change it
    with torch.autocast("cpu", dtype=torch.bfloat16):
        engine.generate(["How tall?"], max_new_tokens=NEW)
    assert not kept(engine)


@pytest.mark.parametrize(
    "options",
    [{"mode": "full"}, {"num_beams": 2}, {"do_sample": False}, {"repetition_penalty": 1.2}],
    ids=str,
)
def test_requests_with_special_options_neither_leave_nor_use_tails(
    engine: BlockAttentionEngine, plain: BlockAttentionEngine, options: dict[str, Any]
) -> None:
    prompt = [*CONTEXT, "How tall?"]
    engine.generate(prompt, max_new_tokens=NEW)
    before = [*kept(engine)]
    expected = plain.generate(prompt, max_new_tokens=NEW, **options)
    for _ in range(2):
        found = engine.generate(prompt, max_new_tokens=NEW, **options)
        assert found.token_ids == expected.token_ids
        assert found.stats.computed_tokens >= len("How tall?")
    assert kept(engine) == before


def test_batches_neither_leave_nor_use_tails() -> None:
    model = BlockModel(tiny_model(), tiny_tokenizer())  # has no settings that prevent batching
    engine, plain = (
        BlockAttentionEngine(model, recipe="head:4", resident_bytes=n) for n in (1 << 30, 0)
    )
    prompts = [[*CONTEXT, "How tall?"], [*CONTEXT, "Where?"]]
    for prompt in prompts:
        engine.generate(prompt, max_new_tokens=NEW)
    before = [*kept(engine)]
    found = engine.generate_batch(prompts, max_new_tokens=NEW)
    assert [one.stats.computed_tokens for one in found] == [len("How tall?"), len("Where?")]
    alone = [plain.generate(prompt, max_new_tokens=NEW).token_ids for prompt in prompts]
    assert [one.token_ids for one in found] == alone
    assert kept(engine) == before


@pytest.mark.parametrize(
    ("family", "setting", "context", "assembly", "is_kept"),
    [
        ("mistral, sliding window", {}, [], "auto", False),
        ("llama", {"prompt_lookup_num_tokens": 2}, [], "auto", False),
        ("llama", {"num_beams": 2}, [], "auto", False),
        ("mistral, sliding window", {}, CONTEXT, "relay", True),
        ("mistral, sliding window", {}, CONTEXT, "copy", False),
        ("gemma3", {}, CONTEXT, "relay", True),
        ("gemma3", {}, CONTEXT, "copy", False),
    ],
    ids=str,
)
def test_windows_leave_a_tail_only_if_blocks_are_read_in_place(
    family: str, setting: dict[str, Any], context: list[str], assembly: Any, is_kept: bool
) -> None:
    kind, config = SUPPORTED[family]
    model = readable(BlockModel(tiny_model(kind, **config), tiny_tokenizer()))
    engine, plain = (
        BlockAttentionEngine(model, resident_bytes=n, assembly=assembly) for n in (1 << 30, 0)
    )
    for name, value in setting.items():
        setattr(model.hf_model.generation_config, name, value)
    for prompt, answer in turns(engine, context):
        assert answer.token_ids == plain.generate(prompt, max_new_tokens=NEW).token_ids
    assert bool(kept(engine)) == is_kept


def test_a_conversation_continues_after_a_stop_string(
    engine: BlockAttentionEngine, plain: BlockAttentionEngine
) -> None:
    whole = plain.generate([*CONTEXT, "How tall?"], max_new_tokens=NEW).text
    stop = whole[3:5]
    cut = engine.generate([*CONTEXT, "How tall?"], max_new_tokens=NEW, stop=[stop])
    assert cut.text == whole.partition(stop)[0] != ""
    prompt = [*CONTEXT, f"How tall?{cut.text} When?"]
    found = engine.generate(prompt, max_new_tokens=NEW)
    assert found.token_ids == plain.generate(prompt, max_new_tokens=NEW).token_ids
    # The tail ends before the stop string, which is not part of the text.
    assert found.stats.computed_tokens == len(" When?")


def test_a_conversation_continues_after_a_closed_stream(
    engine: BlockAttentionEngine, plain: BlockAttentionEngine
) -> None:
    stream = engine.stream([*CONTEXT, "How tall?"], max_new_tokens=1000)
    text = next(stream).text
    stream.close()
    prompt = [*CONTEXT, f"How tall?{text} When?"]
    found = engine.generate(prompt, max_new_tokens=NEW)
    assert found.token_ids == plain.generate(prompt, max_new_tokens=NEW).token_ids
    assert found.stats.computed_tokens <= len(" When?") + 1


def test_every_conversation_has_its_own_tail(
    engine: BlockAttentionEngine, plain: BlockAttentionEngine
) -> None:
    both = [turns(engine, CONTEXT, name) for name in ("one: ", "two: ")]
    for turn in range(len(QUESTIONS)):
        for prompt, answer in map(next, both):
            assert answer.token_ids == plain.generate(prompt, max_new_tokens=NEW).token_ids
            assert not turn or answer.stats.computed_tokens == new_tokens(turn)
    assert len(kept(engine)) == 2


def test_tails_are_limited_and_the_least_recently_used_is_evicted(model: BlockModel) -> None:
    question = "How tall is it?"
    tail = (len(question) + NEW - 1) * model.bytes_per_token
    engine = BlockAttentionEngine(model, resident_bytes=SHARE * 2 * tail)

    def computed(name: str, more: str = "") -> int:
        prompt = [HEAD, name, question + more]
        return engine.generate(prompt, max_new_tokens=NEW).stats.computed_tokens

    for name in ("a", "b", "c"):
        computed(name)
    assert sum(one.nbytes for one in kept(engine)) == 2 * tail
    assert computed("b") == 1
    assert computed("a") == len(question)  # evicted c, which was used before b
    assert [computed(name) for name in ("b", "a")] == [1, 1]
    assert computed("c", " " * 2 * len(question)) > 1  # too large to keep, so nothing is evicted
    assert [computed(name) for name in ("b", "a")] == [1, 1]


@assemblies
def test_a_tail_keeps_no_other_memory_alive(engine: BlockAttentionEngine, assembly: Any) -> None:
    engine = with_settings(engine, assembly=assembly)
    for _ in turns(engine, CONTEXT):
        pass
    (tail,) = kept(engine)
    assert tail.nbytes == len(tail.ids) * engine.model.bytes_per_token
    for states in (one for layer in tail.states for one in layer):
        assert states.untyped_storage().nbytes() == states.nbytes


def test_tails_are_not_stored(model: BlockModel, tmp_path: Path) -> None:
    engine = BlockAttentionEngine(model, tmp_path / "kv")
    said = [prompt[-1] for prompt, _ in turns(engine, CONTEXT)]
    assert len(list(engine.store.keys())) == len(CONTEXT)
    files = [file.read_bytes() for file in (tmp_path / "kv").rglob("*") if file.is_file()]
    assert len(kept(engine)) == 1
    tokens = torch.tensor(kept(engine)[0].ids).numpy().tobytes()
    assert not any(said[0].encode() in file or tokens[:72] in file for file in files)
