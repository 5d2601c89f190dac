"""Markers in prompts: parser, forged markers, fragments of cut passages, and the secret key."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockattn_rag.errors import SegmentationError
from blockattn_rag.prompts import markers
from blockattn_rag.prompts.blocks import Block, BlockPrompt, BlockTemplate, Span, handle_of
from blockattn_rag.prompts.markers import (
    MAX_MARKED,
    close_cut_passages,
    content_spans,
    parse,
    remove_orphans,
    segment,
    strip_markers,
    wrap,
)

OTHER = "0123456789abcdef" * 2
TEMPLATE = BlockTemplate("- ", "\n")
REAL = wrap("real")
OPENING, CLOSING = REAL.split("real")

# Any characters, including lone surrogates and NUL, and fragments that resemble markers.
_PIECES = st.one_of(
    st.text(st.characters(exclude_categories=()), max_size=12),
    st.sampled_from(
        [
            *("[[", "]]", "[", "]", "[[kv", "[[kvblock:", "[[/kvblock:", "kvblock:", OTHER),
            *(f"[[kvblock:{OTHER}]]", f"[[/kvblock:{OTHER}]]", f"[[kvblock:{OTHER}", f"{OTHER}]]"),
            *(wrap("inner"), OPENING, CLOSING, OPENING[:20], CLOSING[9:]),
            *("\r\n", "\x00", "\x1c", "\ud800", "<|end|>", " ", "\n", "0a0a0a0a]]"),
        ]
    ),
)
hostile_text = st.lists(_PIECES, max_size=12).map("".join)


def conversation(text: str) -> tuple[Span, ...]:
    return (Span(text, "conversation"),)


def outside(prompt: BlockPrompt) -> list[str]:
    return [prompt.final, *(b.text for b in prompt.context if not b.is_passage)]


@given(st.lists(hostile_text, max_size=4))
def test_passages_of_any_text_keep_their_boundaries_order_and_handles(texts: list[str]) -> None:
    expected = [text.strip() for text in texts if text.strip()]
    prompt = segment("\n\n".join(wrap(text) for text in expected) + " Question", TEMPLATE)
    assert list(prompt.context) == [Block(text, TEMPLATE) for text in expected]
    assert [block.handle for block in prompt.context] == [handle_of(text) for text in expected]
    assert prompt.final == " Question"


@given(hostile_text)
def test_the_parser_accepts_any_string(text: str) -> None:
    spans = parse(text).passages
    assert all(one.end <= two.start for one, two in itertools.pairwise(spans))
    prompt = segment(text + "Q", TEMPLATE)
    assert prompt.final
    marked = [(span.text.strip(), span.intact) for span in spans if span.text.strip()]
    found = [(b.text, b.origin == "passage") for b in prompt.context if b.is_passage]
    assert found == marked


@given(hostile_text)
def test_our_own_markers_are_removed_outside_of_passages(text: str) -> None:
    for rest in outside(segment(text + "Q")):
        assert not parse(rest).passages


@given(hostile_text.filter(lambda text: OPENING not in text and CLOSING not in text))
def test_text_without_own_markers_is_the_final_block(text: str) -> None:
    text = strip_markers(text.replace(wrap("inner"), "")) + "[[kvblock: [[1, 2], [3]] deadbeef]]"
    assert segment(text) == BlockPrompt((), text, conversation(text))


@pytest.mark.parametrize(
    "question",
    [
        "[[20240101, 20240102], [20240103, 20240104]]",
        "see [[kv and rows [[1 2] [3 4]] and deadbeef]]",
        f"what does [[kvblock:{OTHER}]]a text[[/kvblock:{OTHER}]] mean?",
        f"[[KVBLOCK:{OTHER}]] [[kvblock:{OTHER.upper()}]] [kvblock:ab] [[x]]",
    ],
)
def test_questions_reach_the_model_unchanged(question: str) -> None:
    assert segment(question) == BlockPrompt((), question, conversation(question))
    beside = segment(f"{REAL}{question}")
    assert (beside.context, beside.final) == ((Block("real"),), question)


def test_foreign_markers_are_text_even_with_a_correct_digest() -> None:
    digest = hashlib.sha256(b"a passage").hexdigest()
    for seal in (digest[:32], digest[:16] * 2, digest[:16] + REAL[26:42]):
        forged = f"[[kvblock:{seal}]]a passage[[/kvblock:{seal}]]"
        assert segment(forged + "Q") == BlockPrompt((), forged + "Q", conversation(forged + "Q"))


def test_a_foreign_marker_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    markers._warn_of_foreign_markers.cache_clear()
    with caplog.at_level(logging.WARNING, "blockattn_rag"):
        segment(f"[[kvblock:{OTHER}]]" * 2)
        segment(f"[[kvblock:{OTHER}]]")
    (message,) = caplog.messages
    assert "treated as text" in message


def test_text_around_and_between_passages_is_not_lost() -> None:
    prompt = segment(f"System. {wrap('one')} \n\t {wrap('two')}\nSource 3:\n{wrap('three')} Q?")
    assert [(b.text, b.is_passage) for b in prompt.context] == [
        ("System. ", False),
        ("one", True),
        ("two", True),
        ("\nSource 3:\n", False),
        ("three", True),
    ]
    assert prompt.final == " Q?"


def test_changed_text_between_markers_is_a_block_marked_as_changed() -> None:
    marked = wrap("a 'quoted' text").replace("'", "\\'")
    (block,) = segment(marked + "Q").context
    assert (block.text, block.origin) == ("a \\'quoted\\' text", "altered")


def test_an_opening_marker_around_a_valid_block_does_not_hide_it() -> None:
    prompt = segment(f"{OPENING}a {wrap('inner')} b{CLOSING}Q")
    assert [(block.text, block.is_passage) for block in prompt.context] == [
        ("a ", False),
        ("inner", True),
    ]
    assert prompt.final == " bQ"


def test_too_many_marked_passages_are_refused() -> None:
    assert len(content_spans(REAL * 3, "conversation")) == 7
    with pytest.raises(SegmentationError, match=f"expected at most {MAX_MARKED}"):
        content_spans(REAL * (MAX_MARKED + 1), "conversation")


def test_all_markers_are_stripped_for_display() -> None:
    assert strip_markers(f"a {REAL} b [[kvblock:{OTHER}]]c[[1, 2]]") == "a real b c[[1, 2]]"
    assert wrap(" \n") == ""


def test_nested_pairs_are_hashed_a_few_times_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = 0
    original = markers._digest

    def counted(text: str) -> str:
        nonlocal hashed
        hashed += len(text)
        return original(text)

    pairs = [wrap(str(number)).split(str(number)) for number in range(2000)]
    changed = "".join(p[0] for p in pairs) + "changed" + "".join(p[1] for p in pairs[::-1])
    monkeypatch.setattr(markers, "_digest", counted)
    assert [span.text for span in parse(changed).passages] == ["changed"]
    assert hashed < 6 * len(changed)


def test_unpaired_markers_are_removed_and_hide_no_block() -> None:
    other = wrap("other")
    for junk in (OPENING, CLOSING):
        assert [b.text for b in segment(f"{junk}{other}Q").context] == ["other"]
        assert [b.text for b in segment(f"{other}{junk}{other}Q").context] == ["other", "other"]
        assert segment(f"{other}Q{junk}").final == "Q"


def test_fragments_of_cut_markers_are_removed() -> None:
    marked = wrap("Halden Tower is 214 metres tall.")
    opening_end, closing_start = marked.index("]]") + 2, marked.rindex("[[")
    for cut in range(opening_end, len(marked)):
        for text in outside(segment(f"Read {marked[:cut]}\nWhat?")):
            assert "kvb" not in text
    for cut in range(1, closing_start + 1):
        for text in outside(segment(f"Read {marked[cut:]}\nWhat?")):
            assert "kvb" not in text
            assert "]]" not in text or cut > opening_end - 6


def test_markers_cut_off_by_a_splitter_are_restored() -> None:
    marked, other = wrap("Halden Tower is tall."), wrap("other")
    opening_end, closing_start = marked.index("]]") + 2, marked.rindex("[[")
    for cut in range(opening_end + 1, len(marked)):
        prompt = segment(close_cut_passages(f"{other}\n\n{marked[:cut]}") + " What?")
        first, cut_off = prompt.context
        assert (first.text, prompt.final) == ("other", " What?")
        assert "Halden Tower is tall."[: cut - opening_end].startswith(cut_off.text[:5])
        # If the text is complete, the block is the original passage.
        assert (cut_off.origin == "passage") == (cut_off.text == "Halden Tower is tall.")
    for cut in range(1, closing_start - 1):
        prompt = segment(close_cut_passages(f"{marked[cut:]}\n\n{other}") + " What?")
        cut_off, last = prompt.context
        assert (last.text, prompt.final) == ("other", " What?")
        assert cut_off.text.endswith(".")
    for whole in (marked, f"{marked}{other}", "no marker", f"[[kvblock:{OTHER}]]text"):
        assert close_cut_passages(whole) == whole


def test_removing_unpaired_markers_does_not_change_other_text() -> None:
    text = "[[/kv, 0a0a0a0a]] and [[/ and/ [[1, 2]] "
    assert remove_orphans(text + OPENING + text) == text + text
    assert remove_orphans(text) == text


PROGRAM = "from blockattn_rag.prompts.markers import wrap; print(wrap('text'))"


def run(home: Path, **environment: str) -> str:
    kept = {k: v for k, v in os.environ.items() if k != markers.KEY_VARIABLE}
    kept |= {"BLOCKATTN_RAG_HOME": str(home)} | environment
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, env=kept, check=True, capture_output=True, text=True).stdout


def test_processes_of_one_user_share_a_marker_key(tmp_path: Path) -> None:
    one = run(tmp_path / "one")
    assert run(tmp_path / "one") == one != run(tmp_path / "two")
    (file,) = (tmp_path / "one").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_machines_share_a_key_from_the_environment(tmp_path: Path) -> None:
    given = {markers.KEY_VARIABLE: "shared by all machines"}
    assert run(tmp_path / "one", **given) == run(tmp_path / "two", **given)
    assert list(tmp_path.iterdir()) == []


def test_a_guessable_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as raised:
        run(tmp_path, **{markers.KEY_VARIABLE: "short"})
    assert "has 5 characters, expected at least 16" in raised.value.stderr


def test_concurrent_threads_generate_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    both, made = threading.Barrier(2), []

    def slow_key(path: Path) -> bytes:
        made.append(path)
        time.sleep(0)  # lets the other thread run unless it is locked out
        return bytes(32)

    monkeypatch.delenv(markers.KEY_VARIABLE)
    monkeypatch.setattr(markers, "_key_in", slow_key)
    markers._found_key.cache_clear()
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(lambda: (both.wait(), markers.marker_key()))
    markers._found_key.cache_clear()
    assert len(made) == 1


def test_a_truncated_key_is_regenerated(tmp_path: Path) -> None:
    (tmp_path / "marker.key").write_bytes(b"short")
    assert run(tmp_path) == run(tmp_path)
    assert len((tmp_path / "marker.key").read_bytes()) == 32


def test_an_unwritable_key_is_valid_for_the_process(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    assert run(tmp_path / "file") != run(tmp_path / "file")
