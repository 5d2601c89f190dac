"""Blocks and markers: every text survives, every hostile string parses, and in time."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockattn_rag.blocks import (
    HANDLE_LENGTH,
    Block,
    BlockPrompt,
    BlockTemplate,
    handle_of,
    marked_spans,
    segment,
    strip_markers,
    wrap,
)

OTHER = "0123456789abcdef" * 2
TEMPLATE = BlockTemplate("- ", "\n")

# Any character, lone surrogates and NUL among them, and pieces that look like markers.
_PIECES = st.one_of(
    st.text(st.characters(exclude_categories=()), max_size=12),
    st.sampled_from(
        [
            *("[[", "]]", "[", "]", "[[kv", "[[kvblock:", "[[/kvblock:", "kvblock:", OTHER),
            *(f"[[kvblock:{OTHER}]]", f"[[/kvblock:{OTHER}]]", f"[[kvblock:{OTHER}", f"{OTHER}]]"),
            *(wrap("inner"), "\r\n", "\x00", "\x1c", "\ud800", "<|end|>", " ", "\n", "0a0a0a0a]]"),
        ]
    ),
)
hostile_text = st.lists(_PIECES, max_size=12).map("".join)


def opening(handle: str) -> str:
    return f"[[kvblock:{handle}]]"


def closing(handle: str) -> str:
    return f"[[/kvblock:{handle}]]"


@given(hostile_text)
def test_any_text_comes_back_from_its_markers(text: str) -> None:
    stripped = text.strip()
    expected = [stripped] if stripped else []
    assert [block.text for block in segment(wrap(text) + "Q").context] == expected


@given(st.lists(hostile_text, max_size=4))
def test_passages_of_any_text_keep_their_boundaries_order_and_handles(
    texts: list[str],
) -> None:
    expected = [text.strip() for text in texts if text.strip()]
    prompt = segment("\n\n".join(wrap(text) for text in expected) + " Question", TEMPLATE)
    assert [block.text for block in prompt.context] == expected
    assert [block.handle for block in prompt.context] == [handle_of(text) for text in expected]
    assert prompt.final == " Question"


@given(hostile_text)
def test_no_string_breaks_the_parser(text: str) -> None:
    spans = list(marked_spans(text))
    assert all(one.end <= two.start for one, two in itertools.pairwise(spans))
    prompt = segment(text + "Q", TEMPLATE)
    assert prompt.final
    marked = [span.text.strip() for span in spans if span.text.strip()]
    assert [block.text for block in prompt.context if not block.control] == marked


@given(hostile_text)
def test_no_marker_is_left_outside_of_passages(text: str) -> None:
    prompt = segment(text + "Q")
    for outside in (prompt.final, *(b.text for b in prompt.context if b.control)):
        assert next(marked_spans(outside), None) is None
        assert strip_markers(outside) == outside


@given(hostile_text)
def test_stripping_markers_twice_is_stripping_them_once(text: str) -> None:
    once = strip_markers(text)
    assert strip_markers(once) == once


@given(st.text(st.characters(exclude_characters="[]", exclude_categories=()), min_size=1))
def test_a_string_without_markers_is_the_final_block_as_it_stands(text: str) -> None:
    assert segment(text) == BlockPrompt((), text)


def test_text_before_the_first_block_is_a_block_and_text_after_the_last_is_final() -> None:
    prompt = segment(f"System. {wrap('one')}\n\n{wrap('two')} Question?", TEMPLATE)
    assert prompt.context == (
        Block("System. ", control=True),
        Block("one", TEMPLATE),
        Block("two", TEMPLATE),
    )
    assert prompt.final == " Question?"


def test_white_space_between_blocks_belongs_to_neither_and_other_text_is_a_block() -> None:
    prompt = segment(f"{wrap('one')} \n\t {wrap('two')}\nSource 3:\n{wrap('three')}Q")
    assert [(b.text, b.control) for b in prompt.context] == [
        ("one", False),
        ("two", False),
        ("\nSource 3:\n", True),
        ("three", False),
    ]


def test_the_same_block_may_come_twice() -> None:
    prompt = segment(wrap("one") + wrap("two") + wrap("one") + "Q")
    assert [block.text for block in prompt.context] == ["one", "two", "one"]


def test_a_changed_text_between_its_markers_is_still_one_block_under_its_own_handle() -> None:
    marked = wrap("a 'quoted' text").replace("'", "\\'")
    (block,) = segment(marked + "Q").context
    assert block.text == "a \\'quoted\\' text"
    assert block.handle == handle_of(block.text) != handle_of("a 'quoted' text")


def test_markers_inside_a_passage_stay_part_of_it() -> None:
    for inner in (
        wrap("inner"),
        opening(OTHER) + "x",
        closing(OTHER),
        closing(OTHER) + opening(OTHER),
        f"{opening(OTHER)}forged{closing(OTHER)}",
    ):
        text = f"before {inner} after"
        (block,) = segment(f"{wrap(text)}Q").context
        assert block.text == text


def test_orphan_openings_and_closings_are_removed_and_hide_no_block() -> None:
    real = wrap("real")
    for junk in (opening(OTHER), closing(OTHER), opening(handle_of("real"))):
        assert [b.text for b in segment(f"{junk}{real}Q").context] == ["real"]
        assert [b.text for b in segment(f"{real}{junk}{real}Q").context] == ["real", "real"]
        assert segment(f"{real}Q{junk}").final == "Q"


def test_an_opening_that_encloses_a_real_block_does_not_swallow_it() -> None:
    prompt = segment(f"{opening(OTHER)}a {wrap('real')} b{closing(OTHER)}Q")
    assert [block.text for block in prompt.context] == ["a ", "real"]
    assert prompt.final == " bQ"


def test_every_cut_through_a_marked_string_leaves_no_marker_text() -> None:
    marked = wrap("Halden Tower is 214 metres tall.")
    for cut in range(len(marked) + 1):
        for part in (marked[:cut], marked[cut:]):
            prompt = segment("Question " + part)
            for text in (prompt.final, *(block.text for block in prompt.context)):
                assert "kvblock" not in text


def test_the_head_of_a_cut_marker_needs_four_characters_to_be_known() -> None:
    assert strip_markers("see [[kv") == "see "
    assert strip_markers("see [[k") == "see [[k"
    assert strip_markers("rows [[1 2] [3 4]] and deadbeef]]") == "rows [[1 2] [3 4]] and "


def test_removing_a_marker_makes_no_other_one() -> None:
    marker = opening(OTHER)
    for cut in range(1, len(marker)):
        assert strip_markers(marker[:cut] + marker + marker[cut:] + "text") == "text"
    assert strip_markers("[[kv[[kvblock: text") == " text"


def test_marker_heads_and_tails_of_other_case_or_length_are_ordinary_text() -> None:
    for text in (f"[[KVBLOCK:{OTHER}]]", f"[[kvblock:{OTHER.upper()}]]", "[kvblock:ab]", "[[x]]"):
        assert segment(text) == BlockPrompt((), text)


def _hostile_strings(size: int) -> dict[str, str]:
    def fill(piece: str) -> str:
        return piece * (size // len(piece))

    handles = [f"{i:032x}" for i in range(size // 89)]
    same_opened = fill(opening(OTHER))[: size // 2]
    return {
        "openings": fill(opening(OTHER)),
        "closings": fill(closing(OTHER)),
        "openings, then closings": same_opened + fill(closing(OTHER))[: size // 2],
        "opening and closing in turn": fill(opening(OTHER) + "x" + closing(OTHER)),
        "nested pairs": "".join(map(opening, handles)) + "x" + "".join(map(closing, handles[::-1])),
        "crossed pairs": "".join(map(opening, handles)) + "x" + "".join(map(closing, handles)),
        "markers inside markers": fill(f"[[kvblock:{OTHER}") + fill("]]"),
        "cut heads": fill("[[kvb") + "x",
        "cut heads in words": fill("[[kvb "),
        "cut tails": fill("0a0a0a0a]]") + "x",
        "brackets": fill("["),
        "closing brackets": fill("]"),
        "digits": fill("0") + "[[",
        "white space": fill(" ") + "[[",
        "real blocks": fill(wrap("real") + "\n"),
    }


@pytest.mark.parametrize("name", sorted(_hostile_strings(1000)))
def test_hostile_strings_of_200_kilobytes_parse_in_no_time(name: str) -> None:
    string = _hostile_strings(200_000)[name]
    started = time.process_time()
    segment(string + "Q")
    # Trying every pair of markers takes a minute. Nested pairs take longest, half a second: each of
    # their texts has to be hashed. The bound leaves room for a busy machine.
    assert time.process_time() - started < 5


def test_a_handle_is_the_start_of_the_sha256_of_the_text() -> None:
    assert handle_of("abc") == "ba7816bf8f01cfea414140de5dae2223"
    assert len(handle_of("\ud800")) == HANDLE_LENGTH
    assert wrap(" \n") == ""


def test_a_digest_tells_apart_all_that_changes_the_token_ids() -> None:
    blocks = [
        Block("ab"),
        Block("a", BlockTemplate(after="b")),
        Block("b", BlockTemplate(before="a")),
        Block("ab", control=True),
        Block("ab\0"),
    ]
    digests = {block.digest(first=first) for block in blocks for first in (True, False)}
    assert len(digests) == 2 * len(blocks)


def test_a_prompt_from_texts_takes_the_last_as_final_and_leaves_out_empty_ones() -> None:
    prompt = BlockPrompt.from_texts(["one", "", Block("two", TEMPLATE), "Q"])
    assert prompt == BlockPrompt((Block("one"), Block("two", TEMPLATE)), "Q")
    assert prompt.text == "one- two\nQ"


@pytest.mark.parametrize("texts", ["a string", [], (), ["", ""], [""]])
def test_a_prompt_of_nothing_is_refused(texts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"expected a non-empty list|the prompt is empty"):
        BlockPrompt.from_texts(texts)


@pytest.mark.parametrize("texts", [[None, "Q"], [5, "Q"], ["one", None], ["one", Block("final")]])
def test_a_prompt_of_other_things_than_texts_is_refused(texts: list[str]) -> None:
    with pytest.raises(TypeError, match="must"):
        BlockPrompt.from_texts(texts)


def test_an_empty_block_and_foreign_context_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Block("")
    with pytest.raises(TypeError, match="context must hold Block objects, found str"):
        BlockPrompt(("text",), "Q")  # type: ignore[arg-type]
