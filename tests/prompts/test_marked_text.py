"""Passages that a splitter cut: nothing is left of their markers, and no other text is touched."""

from __future__ import annotations

from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.marked_text import close_cut_passages, remove_orphans, segment
from blockattn_rag.prompts.markers import wrap

OTHER = "0123456789abcdef" * 2
OPENING, CLOSING = wrap("real").split("real")


def outside(prompt: BlockPrompt) -> list[str]:
    return [prompt.final, *(b.text for b in prompt.context if not b.is_passage)]


def test_orphan_openings_and_closings_are_removed_and_hide_no_block() -> None:
    other = wrap("other")
    for junk in (OPENING, CLOSING):
        assert [b.text for b in segment(f"{junk}{other}Q").context] == ["other"]
        assert [b.text for b in segment(f"{other}{junk}{other}Q").context] == ["other", "other"]
        assert segment(f"{other}Q{junk}").final == "Q"


def test_a_splitter_that_cuts_a_marker_leaves_nothing_of_it_beside_its_partner() -> None:
    marked = wrap("Halden Tower is 214 metres tall.")
    opening_end, closing_start = marked.index("]]") + 2, marked.rindex("[[")
    for cut in range(opening_end, len(marked)):
        for text in outside(segment(f"Read {marked[:cut]}\nWhat?")):
            assert "kvb" not in text
    for cut in range(1, closing_start + 1):
        for text in outside(segment(f"Read {marked[cut:]}\nWhat?")):
            assert "kvb" not in text
            assert "]]" not in text or cut > opening_end - 6


def test_a_chunk_of_a_splitter_gets_back_the_markers_that_were_cut_off() -> None:
    marked, other = wrap("Halden Tower is tall."), wrap("other")
    opening_end, closing_start = marked.index("]]") + 2, marked.rindex("[[")
    for cut in range(opening_end + 1, len(marked)):
        prompt = segment(close_cut_passages(f"{other}\n\n{marked[:cut]}") + " What?")
        first, cut_off = prompt.context
        assert (first.text, prompt.final) == ("other", " What?")
        assert "Halden Tower is tall."[: cut - opening_end].startswith(cut_off.text[:5])
        # With all of its text there, it is the passage that it was.
        assert (cut_off.origin == "passage") == (cut_off.text == "Halden Tower is tall.")
    for cut in range(1, closing_start - 1):
        prompt = segment(close_cut_passages(f"{marked[cut:]}\n\n{other}") + " What?")
        cut_off, last = prompt.context
        assert (last.text, prompt.final) == ("other", " What?")
        assert cut_off.text.endswith(".")
    for whole in (marked, f"{marked}{other}", "no marker", f"[[kvblock:{OTHER}]]text"):
        assert close_cut_passages(whole) == whole


def test_removing_orphans_touches_no_other_text() -> None:
    text = "[[/kv, 0a0a0a0a]] and [[/ and/ [[1, 2]] "
    assert remove_orphans(text + OPENING + text) == text + text
    assert remove_orphans(text) == text
