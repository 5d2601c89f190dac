"""A question on which block mode abstains is answered again, and nothing else is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest
import torch

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.retry import abstains, check_abstentions, check_retry
from blockattn_rag.errors import ContextOverflowError
from blockattn_rag.model import BlockModel
from tests.holding import holding
from tests.models import tiny_model, tiny_tokenizer

A = ["Halden is tall.", "It was built in 1931.", "Ferries go.", "How tall?"]
B = ["The lake is deep.", "It lies in the north.", "Who swims there?"]
C = ["One passage.", "Another one.", "What else?"]
NEW = 6


@pytest.fixture(scope="module")
def model() -> BlockModel:
    """A random model that writes letters, so that its answers are short and visible."""
    tokenizer = tiny_tokenizer()
    hf_model: Any = tiny_model("llama")
    tokens = tokenizer.convert_ids_to_tokens(list(range(hf_model.config.vocab_size)))
    mute = [
        place
        for place, token in enumerate(tokens)
        if not (token and len(token) == 1 and token.isascii() and token.isalpha())
    ]
    with torch.no_grad():
        hf_model.get_output_embeddings().weight[mute] = 0
    hf_model.config.block_attention = {"test": True}  # known to be tuned: no warning
    return BlockModel(hf_model, tokenizer)


@pytest.fixture
def engine(model: BlockModel) -> BlockAttentionEngine:
    """Abstains on A in block mode: that answer is a phrase of abstentions, and others are not."""
    engine = BlockAttentionEngine(model)
    texts = {
        (texts[0], str(options)): engine.generate(texts, max_new_tokens=NEW, **options).text
        for texts in (A, B, C)
        for options in ({}, {"mode": "full"}, {"promote": 1})
    }
    assert len(set(texts.values())) == len(texts)
    engine.abstentions = (texts[A[0], "{}"].upper(),)
    return engine


def counts(stats: Any) -> list[int]:
    names = ("hits", "misses", "reused_tokens", "computed_tokens", "promoted_tokens")
    return [getattr(stats, name) for name in (*names, "generated_tokens")]


@pytest.mark.parametrize(
    ("retry", "other"), [("full", {"mode": "full"}), ("promote:1", {"promote": 1})]
)
def test_the_second_answer_is_given_with_the_cost_of_both(
    engine: BlockAttentionEngine, retry: str, other: dict[str, Any]
) -> None:
    first = engine.generate(A, max_new_tokens=NEW)
    second = engine.generate(A, max_new_tokens=NEW, **other)
    found = engine.generate(A, max_new_tokens=NEW, retry=retry)
    assert (found.text, found.token_ids) == (second.text, second.token_ids)
    assert (found.stats.mode, found.stats.retried) == ("block", retry)
    assert counts(found.stats) == [
        one + two for one, two in zip(counts(first.stats), counts(second.stats), strict=True)
    ]
    assert 0 < found.stats.prefill_s < found.stats.ttft_s < found.stats.total_s


def test_what_is_no_abstention_or_has_no_passages_is_given_as_it_is(
    engine: BlockAttentionEngine,
) -> None:
    assert engine.generate(A, max_new_tokens=NEW).stats.retried == "none"
    for texts, options in ((B, {}), (A, {"mode": "full"}), (A, {"promote": 1})):
        plain = engine.generate(texts, max_new_tokens=NEW, **options)
        found = engine.generate(texts, max_new_tokens=NEW, retry="promote:1", **options)
        assert found.text == plain.text
        assert counts(found.stats) == counts(plain.stats)
        assert found.stats.retried == "none"
    engine.abstentions = (engine.generate([A[-1]], max_new_tokens=NEW).text,)
    alone = engine.generate([A[-1]], max_new_tokens=NEW, retry="full")
    assert alone.stats.retried == "none"


def test_a_second_abstention_is_given(engine: BlockAttentionEngine) -> None:
    full = engine.generate(A, max_new_tokens=NEW, mode="full").text
    engine.abstentions = (*engine.abstentions, full)
    found = engine.generate(A, max_new_tokens=NEW, retry="full")
    assert (found.text, found.stats.retried) == (full, "full")


def test_of_a_batch_only_abstentions_are_answered_again(
    engine: BlockAttentionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [engine.generate(texts, max_new_tokens=NEW).text for texts in (B, C)]
    full = engine.generate(A, max_new_tokens=NEW, mode="full").text
    prepared: list[str] = []
    original = engine._runner.prepare

    def prepare(prompt: Any, options: Any) -> Any:
        prepared.append(options.mode)
        return original(prompt, options)

    monkeypatch.setattr(engine._runner, "prepare", prepare)
    found = engine.generate_batch([B, A, C, A], max_new_tokens=NEW, retry="full")
    assert [one.text for one in found] == [expected[0], full, expected[1], full]
    assert [one.stats.retried for one in found] == ["none", "full", "none", "full"]
    assert prepared == ["block"] * 4 + ["full"] * 2


def test_an_engine_retries_by_default(model: BlockModel, engine: BlockAttentionEngine) -> None:
    retrying = BlockAttentionEngine(model, retry="full")
    retrying.abstentions = engine.abstentions
    assert retrying.generate(A, max_new_tokens=NEW).stats.retried == "full"
    assert retrying.generate(A, max_new_tokens=NEW, retry="none").stats.retried == "none"


def test_what_abstained_in_a_batch_that_fails_is_answered_again_and_the_rest_anew(
    engine: BlockAttentionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    abstention = engine.generate(A, max_new_tokens=NEW).token_ids
    expected = [engine.generate(A, max_new_tokens=NEW, mode="full").text]
    expected += [engine.generate(B, max_new_tokens=NEW).text]

    original = engine.model.generate_batch

    def fail(*_: Any, on_tokens: Any, **__: Any) -> None:
        monkeypatch.setattr(engine.model, "generate_batch", original)  # of the second answers
        for token in abstention:
            on_tokens([token, token])
        on_tokens([None, abstention[0]])  # the first row has ended
        raise MemoryError

    for texts in ([A, B], [A, A]):  # of the latter, the second one is yet to abstain
        monkeypatch.setattr(engine.model, "generate_batch", fail)
        found = engine.generate_batch(texts, max_new_tokens=NEW, retry="full")
        retried = ["none" if one is B else "full" for one in texts]
        assert [one.text for one in found] == [expected[one is B] for one in texts]
        assert [one.stats.retried for one in found] == retried


async def test_tasks_get_the_second_answer(engine: BlockAttentionEngine) -> None:
    full = engine.generate(A, max_new_tokens=NEW, mode="full").text
    calls = (engine.agenerate(texts, max_new_tokens=NEW, retry="full") for texts in (A, B))
    found = await asyncio.gather(*calls)
    assert [one.stats.retried for one in found] == ["full", "none"]
    assert found[0].text == full


async def test_streams_show_nothing_of_an_abstention(engine: BlockAttentionEngine) -> None:
    for texts in (A, B):
        expected = engine.generate(texts, max_new_tokens=NEW, retry="full").text
        stream = engine.stream(texts, max_new_tokens=NEW, retry="full")
        astream = engine.astream(texts, max_new_tokens=NEW, retry="full")
        for pieces in (list(stream), [piece async for piece in astream]):
            assert "".join(piece.text for piece in pieces) == expected
            assert pieces[-1].generation is not None
            assert pieces[-1].generation.text == expected


def test_a_long_answer_streams_once_it_cannot_be_an_abstention(
    engine: BlockAttentionEngine,
) -> None:
    engine.abstentions = tuple("abcdefghijklmnopqrstuvwxyz")
    plain = engine.generate(B, max_new_tokens=220).text
    assert len(plain) == 220
    pieces = [one.text for one in engine.stream(B, max_new_tokens=220, retry="full")]
    assert "".join(pieces) == plain
    assert [len(piece) for piece in pieces[:3]] == [201, 1, 1]


def test_a_second_answer_streams_as_it_comes_and_ends_when_its_reader_leaves(
    engine: BlockAttentionEngine,
) -> None:
    with (
        holding() as held,
        closing(engine.stream(A, max_new_tokens=NEW, retry="full")) as stream,
    ):
        held.let_go(NEW + 1)  # the abstention, and one token of the second answer
        assert len(next(stream).text) == 1
        stream.close()
        held.wait_for_end()
    assert held.tokens <= NEW + 3
    assert engine.generate(B, max_new_tokens=NEW).text  # the model is free


def test_an_error_of_the_second_answer_is_raised(
    engine: BlockAttentionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = engine._runner.prepare

    def prepare(prompt: Any, options: Any) -> Any:
        if options.mode == "full":
            raise ContextOverflowError("too long")
        return original(prompt, options)

    monkeypatch.setattr(engine._runner, "prepare", prepare)
    with pytest.raises(ContextOverflowError, match="too long"):
        engine.generate(A, max_new_tokens=NEW, retry="full")
    assert engine.generate(B, max_new_tokens=NEW, retry="full").text


@pytest.mark.parametrize(
    "answer",
    [
        "I don't know.",
        "I DON\u2019T KNOW",
        "The context does not mention the height.",
        "The provided context\ndoesn't say.",
        "It is not mentioned.",
    ],
)
def test_short_answers_with_a_phrase_are_abstentions(answer: str) -> None:
    assert abstains(answer)
    assert not abstains(answer + " It is 40 metres high." * 10)


def test_other_answers_are_none() -> None:
    assert not any(map(abstains, ["", "40 metres", "Nobody knows more than Ann.", "No."]))
    assert abstains("Das steht nicht im Text.", ["steht nicht im text"])
    assert not abstains("I don't know.", ["steht nicht im Text"])


@pytest.mark.parametrize("retry", ["none", "full", "promote:2", "promote:attention:1"])
def test_known_forms_are_kept(retry: str) -> None:
    assert check_retry(retry) == retry


@pytest.mark.parametrize("retry", ["block", "promote", "promote:none", "promote:best", 1, ""])
def test_other_forms_are_refused(engine: BlockAttentionEngine, retry: Any) -> None:
    with pytest.raises(ValueError, match="must be 'none'"):
        engine.generate(A, retry=retry)


@pytest.mark.parametrize(
    ("phrases", "error"),
    [("unknown", TypeError), ([""], ValueError), ([" "], ValueError), ([None], ValueError)],
)
def test_phrases_that_every_answer_holds_are_refused(
    engine: BlockAttentionEngine, phrases: Sequence[str], error: type[Exception]
) -> None:
    with pytest.raises(error, match="abstentions must be"):
        engine.abstentions = phrases
    assert check_abstentions(["weiß nicht"]) == ("weiß nicht",)
