"""The splitter fills chunks with complete blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from blockattn_rag.llama_index.packing import BlockTextSplitter
from blockattn_rag.prompts.blocks import BlockTemplate
from blockattn_rag.prompts.markers import segment, wrap

TEMPLATE = BlockTemplate(after="\n\n")


def splitter(size: int, overlap: int = 0) -> BlockTextSplitter:
    return BlockTextSplitter(size, overlap, tokenizer=list, block_template=TEMPLATE)


def blocks_of(chunk: str) -> list[str]:
    return [block.text for block in segment(chunk + "!", TEMPLATE).context if block.is_passage]


def test_a_chunk_contains_as_many_blocks_as_fit() -> None:
    text = "\n\n".join(wrap(c * 8) for c in "abcde")
    assert [blocks_of(c) for c in splitter(20).split_text(text)] == [
        ["a" * 8, "b" * 8],
        ["c" * 8, "d" * 8],
        ["e" * 8],
    ]


def test_markers_do_not_count_towards_the_chunk_size() -> None:
    text = wrap("a" * 8) + "\n\n" + wrap("b" * 8)
    assert splitter(20).split_text(text) == [text]


def test_blocks_do_not_overlap() -> None:
    text = "\n\n".join(wrap(c * 8) for c in "abc")
    chunks = splitter(10, overlap=9).split_text(text)
    assert [blocks_of(c) for c in chunks] == [["a" * 8], ["b" * 8], ["c" * 8]]


def test_a_label_stays_with_its_block() -> None:
    text = "\n\n".join(f"Source {i}:\n{wrap(c * 8)}" for i, c in enumerate("abc", start=1))
    chunks = splitter(25).split_text(text)
    assert [c.partition("\n")[0] for c in chunks] == ["Source 1:", "Source 2:", "Source 3:"]


def test_a_block_larger_than_a_chunk_becomes_blocks_that_fit() -> None:
    text = " ".join(f"word{i}" for i in range(20))
    chunks = splitter(40).split_text(wrap("small") + "\n\n" + wrap(text))
    pieces = [piece for chunk in chunks for piece in blocks_of(chunk)]
    assert pieces[0] == "small"
    assert " ".join(pieces[1:]) == text
    assert all(len(piece) + 2 <= 40 for piece in pieces)
    assert all("kvblock" not in piece for piece in pieces)


def test_text_without_markers_is_split_as_usual() -> None:
    chunks = splitter(10, overlap=5).split_text("aa bb cc dd ee ff")
    assert chunks == ["aa bb cc", "cc dd ee", "ee ff"]


def test_long_text_between_blocks_is_split_and_blocks_are_not() -> None:
    between = " ".join(["gap"] * 30)
    chunks = splitter(30).split_text(wrap("one") + "\n\n" + between + "\n\n" + wrap("two"))
    assert [text for chunk in chunks for text in blocks_of(chunk)] == ["one", "two"]
    assert sum(chunk.count("gap") for chunk in chunks) == 30


texts = st.text(alphabet="ab \n漢[]/k:", min_size=1, max_size=60).filter(str.strip)


@given(st.lists(st.tuples(texts, st.booleans()), max_size=8), st.integers(4, 60))
def test_chunks_fit_and_keep_markers(parts: list[tuple[str, bool]], size: int) -> None:
    text = "\n\n".join(wrap(part) if is_block else part for part, is_block in parts)
    small = {p.strip() for p, is_block in parts if is_block and len(p.strip()) + 2 <= size}
    seen: set[str] = set()
    for chunk in splitter(size).split_text(text):
        prompt = segment(chunk + "!", TEMPLATE)
        seen.update(blocks_of(chunk))
        assert "kvblock" not in prompt.text
        assert len(prompt.text) - 1 <= size
    assert small <= seen


def test_fragments_of_markers_are_dropped() -> None:
    stray = wrap("text").partition("text")[2]
    assert splitter(10).split_text(f"{stray} aa bb {stray}") == ["aa bb"]


def test_parts_of_a_changed_passage_are_blocks_marked_as_changed() -> None:
    changed = wrap("x" * 8).replace("x" * 8, " ".join(["word"] * 20))
    blocks = [b for c in splitter(30).split_text(changed) for b in segment(c + "!").context]
    assert len(blocks) > 1
    assert {block.origin for block in blocks} == {"altered"}
    assert " ".join(block.text for block in blocks) == " ".join(["word"] * 20)
