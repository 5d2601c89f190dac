from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from recipes.bundled_model.names import Split, pair_name
from recipes.bundled_model.tokenizer import BOS, CHAT_TEMPLATE, EOS, SPECIAL_TOKENS

relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)


def plain(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)


@relaxed
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_the_round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(plain(tokenizer, text)) == text


@relaxed
@given(number=st.integers(0, 10**9))
def test_every_digit_is_one_token(tokenizer: PreTrainedTokenizerFast, number: int) -> None:
    tokens = tokenizer.convert_ids_to_tokens(plain(tokenizer, str(number)))
    assert tokens == list(str(number))


def test_bos_comes_only_when_special_tokens_are_wanted(tokenizer: PreTrainedTokenizerFast) -> None:
    with_bos = tokenizer("Hello").input_ids
    assert with_bos == [tokenizer.bos_token_id, *plain(tokenizer, "Hello")]


def test_special_tokens_are_parsed_in_templates_and_not_in_passages(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    for token in SPECIAL_TOKENS:
        parsed = tokenizer(token, add_special_tokens=False).input_ids
        assert parsed == [tokenizer.convert_tokens_to_ids(token)]
        assert parsed[0] not in plain(tokenizer, f"a {token} b")


def test_every_name_is_two_syllables(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(0)
    splits: tuple[Split, ...] = ("train", "test")
    for split in splits:
        for _ in range(300):
            name = pair_name(rng, split)
            assert len(plain(tokenizer, f" {name}")) == 2, name


def test_the_chat_template_writes_bos_once(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.chat_template == CHAT_TEMPLATE
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (f"{BOS}<|system|>\nS{EOS}\n<|user|>\nU{EOS}\n<|assistant|>\n")
