from __future__ import annotations

import builtins
import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.schema import MetadataMode

from blockattn_rag.app.rag.documents import UnreadableFileError, load_documents


def test_files_below_a_folder_are_read_except_hidden_and_binary_ones(documents: Path) -> None:
    loaded = load_documents([documents])
    assert [Path(d.metadata["source"]).name for d in loaded.documents] == ["river.md", "tower.txt"]
    [(file, reason)] = loaded.skipped
    assert file.name == "picture.raw"
    assert "binary" in reason


def test_file_paths_are_hidden_from_the_model_and_the_embedder(documents: Path) -> None:
    for document in load_documents([documents]).documents:
        for mode in (MetadataMode.LLM, MetadataMode.EMBED):
            assert str(documents) not in document.get_content(mode)


def test_follows_links_within_a_folder_only(documents: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    secret = outside / "secret.txt"
    secret.write_text("The key is 1234.", encoding="utf-8")
    (documents / "file.txt").symlink_to(secret)
    (documents / "folder").symlink_to(outside)
    (documents / "gone.txt").symlink_to(outside / "never.txt")
    (documents / "within.txt").symlink_to("tower.txt")
    (documents / "circle.txt").symlink_to("circle.txt")
    loaded = load_documents([documents])
    names = [Path(d.metadata["source"]).name for d in loaded.documents]
    assert names == ["river.md", "tower.txt", "within.txt"]
    assert [link.name for link in loaded.links] == ["file.txt", "folder", "gone.txt"]
    for named in (documents / "file.txt", documents / "folder"):
        [document] = load_documents([named]).documents
        assert document.metadata["source"] == str(secret)


def test_links_into_the_excluded_folder_are_not_followed(documents: Path) -> None:
    (documents / "link.md").symlink_to(documents / "more" / "river.md")
    found = load_documents([documents], exclude=documents / "more").documents
    assert [Path(d.metadata["source"]).name for d in found] == ["tower.txt"]


def test_a_pdf_is_read_page_by_page(tmp_path: Path) -> None:
    path = tmp_path / "pages.pdf"
    path.write_bytes(two_pages("First page.", "Second page."))
    found = load_documents([path]).documents
    assert [d.text.strip() for d in found] == ["First page.", "Second page."]
    assert {d.metadata["source"] for d in found} == {str(path)}


def test_html_is_decoded_with_its_declared_charset(tmp_path: Path) -> None:
    page = '<meta charset="iso-8859-1"><p>Stra\u00dfe</p>'
    (tmp_path / "old.html").write_bytes(page.encode("latin-1"))
    assert [d.text for d in load_documents([tmp_path]).documents] == ["Stra\u00dfe"]
    (tmp_path / "old.html").write_text("<script>only()</script>", encoding="utf-8")
    with pytest.raises(UnreadableFileError, match="contains no text"):
        load_documents([tmp_path / "old.html"])


def test_a_named_file_must_be_readable_and_exist(documents: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n", encoding="utf-8")
    damaged = tmp_path / "damaged.pdf"
    damaged.write_bytes(b"%PDF-1.4 no more")
    for path, message in (
        (documents / "picture.raw", "binary"),
        (empty, "contains no text"),
        (damaged, "cannot be read"),
    ):
        with pytest.raises(UnreadableFileError, match=message):
            load_documents([path])
    with pytest.raises(FileNotFoundError, match="No such file or folder"):
        load_documents([tmp_path / "nothing"])


def test_a_vanished_file_is_reported_and_the_others_are_read(documents: Path) -> None:
    def vanish(done: int, _: int) -> None:
        (documents / "tower.txt").unlink(missing_ok=True)

    (documents / "a.txt").write_text("First.", encoding="utf-8")
    loaded = load_documents([documents], on_progress=vanish)
    assert [Path(d.metadata["source"]).name for d in loaded.documents] == ["a.txt", "river.md"]
    assert loaded.inaccessible == [
        (documents / "tower.txt", "cannot be opened (No such file or directory)")
    ]


@pytest.mark.parametrize("suffix", [".txt", ".md", ".html"])
@pytest.mark.parametrize("named", [True, False])
def test_an_inaccessible_file_is_reported_and_the_others_are_read(
    documents: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, named: bool
) -> None:
    file = documents / f"forbidden{suffix}"
    file.write_text("Secret.", encoding="utf-8")
    forbid(monkeypatch, file)
    loaded = load_documents([file, documents / "tower.txt"] if named else [documents])
    assert "tower.txt" in [Path(d.metadata["source"]).name for d in loaded.documents]
    assert loaded.inaccessible == [(file, "cannot be opened (Permission denied)")]


def test_inaccessible_folders_are_reported_and_the_others_are_read(
    documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more, unlisted = documents / "more", documents / "unlisted.txt"
    unlisted.write_text("Text.", encoding="utf-8")
    forbid(monkeypatch, more, unlisted, functions=("scandir", "stat"))
    for paths in ([documents], [documents, more]):
        loaded = load_documents(paths)
        assert [Path(d.metadata["source"]).name for d in loaded.documents] == ["tower.txt"]
        assert dict(loaded.inaccessible) == dict.fromkeys(
            (more, unlisted), "cannot be opened (Permission denied)"
        )
    with pytest.raises(UnreadableFileError, match=r"No readable document .*more: cannot be opened"):
        load_documents([more])


def forbid(
    monkeypatch: pytest.MonkeyPatch, *paths: Path, functions: tuple[str, ...] = ("open",)
) -> None:
    """Deny access to files and folders, as the system does for users other than root."""

    def refusing(call: Any) -> Any:
        def wrapped(path: Any, *args: Any, **options: Any) -> Any:
            if isinstance(path, (str, Path)) and Path(path) in paths:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(path, *args, **options)

        return wrapped

    for name in functions:
        for module in (io, builtins) if name == "open" else (os,):
            monkeypatch.setattr(module, name, refusing(getattr(module, name)))


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.html"])
def test_byte_order_marks_are_removed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("\ufeffHalden Tower", encoding="utf-8")
    [document] = load_documents([tmp_path]).documents
    assert document.text.strip() == "Halden Tower"


def test_folder_without_text_is_an_error(documents: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnreadableFileError, match="No readable document"):
        load_documents([tmp_path / "empty"])
    found = load_documents([documents], exclude=documents / "more").documents
    assert [Path(d.metadata["source"]).name for d in found] == ["tower.txt"]


def two_pages(*texts: str) -> bytes:
    """Return a PDF with one line of text on each of two pages."""
    from io import BytesIO

    from pypdf import PdfWriter
    from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

    writer: Any = PdfWriter()
    font = DictionaryObject(
        {
            NameObject("/Type"): NameObject("/Font"),
            NameObject("/Subtype"): NameObject("/Type1"),
            NameObject("/BaseFont"): NameObject("/Helvetica"),
        }
    )
    for text in texts:
        page = writer.add_blank_page(200, 200)
        stream = DecodedStreamObject()
        stream.set_data(f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode())
        fonts = DictionaryObject({NameObject("/F1"): writer._add_object(font)})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        page[NameObject("/Contents")] = writer._add_object(stream)
    buffer = BytesIO()
    writer.write(buffer)
    return buffer.getvalue()


def test_text_that_is_not_utf8_is_refused_rather_than_stripped(tmp_path: Path) -> None:
    file = tmp_path / "old.txt"
    file.write_bytes("Stra\u00dfe".encode("latin-1"))
    with pytest.raises(UnreadableFileError, match=r"cannot be read .*utf-8"):
        load_documents([file])
    (tmp_path / "good.txt").write_text("Text.", encoding="utf-8")
    assert [file.name for file, _ in load_documents([tmp_path]).skipped] == ["old.txt"]


def test_a_folder_of_unreadable_files_raises_the_reason(documents: Path) -> None:
    (documents / "tower.txt").unlink()
    (documents / "more" / "river.md").unlink()
    with pytest.raises(
        UnreadableFileError, match=r"No readable document .*picture\.raw: is binary"
    ):
        load_documents([documents])
