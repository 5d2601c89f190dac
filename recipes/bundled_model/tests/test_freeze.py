from __future__ import annotations

from pathlib import Path

from blockattn_rag.app.demo.corpus import bundled_corpus
from recipes.bundled_model.freeze import ARTICLES_PER_KIND, DATA, main
from recipes.bundled_model.names import ending_of, held_out_words


def test_the_files_of_the_demo_come_out_again_byte_for_byte(tmp_path: Path) -> None:
    main(tmp_path)
    written = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert written == {file.name: file.read_bytes() for file in DATA.glob("*.jsonl")}


def test_names_of_one_kind_of_the_bundled_corpus_do_not_rhyme() -> None:
    titles = [passage.title for passage in bundled_corpus()]
    for start in range(0, len(titles), ARTICLES_PER_KIND):
        names = titles[start : start + ARTICLES_PER_KIND]
        for words in zip(*(name.split() for name in names), strict=True):
            invented = [word for word in words if word in held_out_words()]
            assert len({ending_of(word) for word in invented}) == len(invented)
            assert len(invented) in (0, ARTICLES_PER_KIND)
