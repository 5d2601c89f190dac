from __future__ import annotations

import itertools
import random
import re

import pytest
from transformers import PreTrainedTokenizerFast

from blockattn_rag.lab.training.data import SampleEncoder
from recipes.bundled_model.corpus import generate_samples
from recipes.bundled_model.formats import LLAMA_INDEX_CHAT, MIX, draw_format
from recipes.bundled_model.names import FIRST, SECOND
from recipes.bundled_model.rows import RowWriter


def learned(tokenizer: PreTrainedTokenizerFast, ids: list[int], weights: list[float]) -> str:
    return str(tokenizer.decode([i for i, weight in zip(ids, weights, strict=True) if weight == 1]))


def test_shares_of_the_formats_sum_to_one() -> None:
    assert abs(sum(share for _, share in MIX) - 1) < 1e-9


def test_a_limit_on_the_frame_leaves_long_formats_out() -> None:
    rng = random.Random(0)
    drawn = {draw_format(rng, longest=250) for _ in range(200)}
    assert LLAMA_INDEX_CHAT not in drawn
    assert len(drawn) > 2


def test_copy_rows_teach_the_repeat_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    row = RowWriter(tokenizer, random.Random(0)).copy(length=10, gap=4)
    assert row.ids[:10] == row.ids[-10:]
    assert row.weights == [0.0] * (len(row.ids) - 9) + [1.0] * 9


@pytest.mark.parametrize("sort", ["facts", "articles"])
def test_fact_rows_ask_only_for_what_they_state(
    tokenizer: PreTrainedTokenizerFast, sort: str
) -> None:
    writer = RowWriter(tokenizer, random.Random(0))
    for _ in range(10):
        row = getattr(writer, sort)()
        stated = str(tokenizer.decode(row.ids)).split("\n")[0]
        values = learned(tokenizer, row.ids, row.weights).split(".")
        assert values.pop() == ""
        assert len(values) >= 2
        assert all(value in stated for value in values)


def test_article_rows_tell_every_second_fact_with_a_pronoun_and_some_entities_again(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    writer = RowWriter(tokenizer, random.Random(0))
    told_again = 0
    for _ in range(20):
        row = writer.articles(questions=100)  # asks for all facts, and therefore all names
        stated, _, questions = str(tokenizer.decode(row.ids)).partition("\n")
        names = set(re.findall(r" of (.+?) is ", questions))
        sentences = re.split(r"(?<=\.) ", stated)
        named = [next((name for name in names if name in s), None) for s in sentences]
        assert None in named
        assert all(before or here for before, here in itertools.pairwise([None, *named]))
        runs = [name for name, _ in itertools.groupby(filter(None, named))]
        told_again += len(runs) > len(names)
    assert told_again


def test_training_names_share_syllables_more_often_than_by_chance(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alike(write: str) -> int:
        """Count the invented words that begin like another word of their row, over all rows."""
        begin, end = "|".join(FIRST), "|".join(SECOND)
        writer = RowWriter(tokenizer, random.Random(5))
        found = 0
        for _ in range(60):
            row = writer.scene((5, 5)) if write == "scene" else getattr(writer, write)()
            text = str(tokenizer.decode(row.ids))
            first = [f for f, _ in set(re.findall(rf"\b({begin})({end})\b", text))]
            found += len(first) - len(set(first))
        return found

    sorts = ("facts", "articles", "scene")
    asked = {sort: alike(sort) for sort in sorts}
    monkeypatch.setattr("recipes.bundled_model.rows.ALIKE", 0.0)
    for sort in sorts:
        assert asked[sort] > 1.3 * alike(sort), sort


def test_number_rows_state_true_comparisons(tokenizer: PreTrainedTokenizerFast) -> None:
    row = RowWriter(tokenizer, random.Random(0)).numbers()
    words = learned(tokenizer, row.ids, row.weights).split()
    verdicts = [
        (words[i - 2], w, words[i + 2]) for i, w in enumerate(words) if w in ("more", "less")
    ]
    verdicts = [(x, w, y.strip(".,")) for x, w, y in verdicts if x.isdigit()]
    assert len(verdicts) == 8
    assert all((int(x) > int(y)) == (word == "more") for x, word, y in verdicts)


def test_scene_rows_learn_whole_answers(tokenizer: PreTrainedTokenizerFast) -> None:
    writer = RowWriter(tokenizer, random.Random(0))
    for _ in range(20):
        row = writer.scene((1, 4))
        assert row.ids[0] == tokenizer.bos_token_id
        answers = learned(tokenizer, row.ids, row.weights).split("<|end|>")
        assert answers.pop() == ""
        assert 1 <= len(answers) <= 8
        assert all(
            answer.startswith(("The ", "(A) The ")) and answer.endswith(".") for answer in answers
        )


def test_no_question_is_given_away_by_an_earlier_answer(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    writer = RowWriter(tokenizer, random.Random(1))
    for _ in range(20):
        row = writer.scene((2, 5))
        sentences = [
            sentence
            for answer in learned(tokenizer, row.ids, row.weights).split("<|end|>")
            for sentence in re.split(r"\.(?: |$)|\([AB]\) ", answer)
            if sentence
        ]
        assert len(sentences) == len(set(sentences))


def test_a_record_gives_the_tokens_of_the_row(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = SampleEncoder(tokenizer)
    for seed in range(20):
        row = RowWriter(tokenizer, random.Random(seed)).scene((2, 4))
        record = RowWriter(tokenizer, random.Random(seed)).record((2, 4))
        encoded = encoder.encode_record(record)
        assert encoded.input_ids == row.ids
        assert [label >= 0 for label in encoded.labels] == [w == 1 for w in row.weights]


def test_a_sample_row_marks_the_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    sample = generate_samples(0, "test", "comparison", 2, 1)[0]
    row = RowWriter(tokenizer, random.Random(0)).sample(sample)
    assert learned(tokenizer, row.ids, row.weights) == f"{sample.answer}<|end|>"
