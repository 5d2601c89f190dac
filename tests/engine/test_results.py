"""Tokens become text: whole characters, no stop string, and pieces that add up."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockattn_rag.engine.detokenizer import AnswerText
from blockattn_rag.engine.results import Clock, ReuseStats
from blockattn_rag.model.sampling import Sampling
from tests.models import tiny_tokenizer

TOKENIZER: Any = tiny_tokenizer()  # one token a byte
END = 257


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def pieces(ids: list[int], *stop: str) -> tuple[AnswerText, list[str]]:
    answer = AnswerText(TOKENIZER, stop)
    return answer, [*(answer.push(token) for token in ids), answer.finish()]


@given(st.text())
def test_pieces_add_up_to_the_text(text: str) -> None:
    answer, parts = pieces(ids_of(text))
    assert "".join(parts) == answer.text == text
    assert not answer.stopped


@given(st.lists(st.integers(0, 263), max_size=30))
def test_pieces_of_any_tokens_add_up_to_what_the_tokenizer_makes_of_them(ids: list[int]) -> None:
    answer, parts = pieces(ids)
    assert "".join(parts) == answer.text
    # Bytes that are no character, cut by a control token, may be grouped in another way.
    expected = TOKENIZER.decode(ids, skip_special_tokens=True)
    assert answer.text.replace("\ufffd", "") == expected.replace("\ufffd", "")


def test_a_character_of_several_tokens_comes_when_it_is_whole() -> None:
    _, parts = pieces(ids_of("aé🙂"))
    assert parts == ["a", "", "é", "", "", "", "🙂", ""]


def test_a_character_that_never_becomes_whole_comes_at_the_end() -> None:
    _, parts = pieces(ids_of("é")[:1])
    assert parts == ["", "\ufffd"]


def test_control_tokens_are_not_part_of_the_text() -> None:
    answer, _ = pieces([*ids_of("yes"), END])
    assert answer.text == "yes"


@given(st.text("ab\n", max_size=20), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
def test_the_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    # A stop string counts when its last character comes; of those the one that starts first.
    ends = [at + len(stop) for stop in stops if (at := text.find(stop)) >= 0]
    seen = text[: min(ends)] if ends else text
    expected = seen[: min((at for s in stops if (at := seen.find(s)) >= 0), default=len(seen))]
    answer, parts = pieces(ids_of(text), *stops)
    assert "".join(parts) == answer.text == expected
    assert answer.stopped == bool(ends)


def test_what_may_become_a_stop_string_is_held_back_and_given_when_it_did_not() -> None:
    answer, parts = pieces(ids_of("a\n\nb\nc"), "\n\n\n")
    assert parts[:4] == ["a", "", "", "\n\nb"]
    assert answer.text == "a\n\nb\nc"


def test_nothing_comes_after_a_stop_string() -> None:
    answer, parts = pieces(ids_of("yesSTOPno"), "STOP")
    assert answer.text == "".join(parts) == "yes"
    assert answer.stopped


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, found 0"),
        ({"temperature": -1.0}, "temperature must not be negative"),
        ({"stop": ("",)}, "stop must be a list of non-empty strings"),
        ({"extra": {"past_key_values": None}}, "past_key_values cannot be given"),
        ({"extra": {"use_cache": False, "num_return_sequences": 2}}, "num_return_sequences, use"),
    ],
)
def test_bad_options_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**arguments)


def test_figures_add_up() -> None:
    stats = ReuseStats("block", hits=2, misses=1, reused_tokens=30, computed_tokens=12)
    assert stats.prompt_tokens == 42
    clock = Clock(began := time.perf_counter() - 10)
    clock.assembling, clock.prefilling, clock.first_token = began + 1, began + 3, began + 7
    done = clock.complete(stats, 5)
    assert (done.assemble_s, done.prefill_s, done.ttft_s) == pytest.approx((2.0, 4.0, 7.0))
    assert (done.generated_tokens, done.hits) == (5, 2)
    assert done.total_s > done.ttft_s


def test_figures_of_several_requests_add_up() -> None:
    first = ReuseStats("block", 2, 1, 30, 12, 4, ttft_s=0.5, total_s=1.0)
    second = ReuseStats("full", 1, 0, 10, 3, 2, ttft_s=0.25, total_s=0.5)
    both = sum([first, second], ReuseStats("block"))
    assert both == ReuseStats("block", 3, 1, 40, 15, 6, ttft_s=0.75, total_s=1.5)
    assert both.reuse() == {"hits": 3, "misses": 1, "reused_tokens": 40, "computed_tokens": 15}
