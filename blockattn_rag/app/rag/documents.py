"""Reads files into LlamaIndex documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llama_index.core.readers.base import BaseReader
    from llama_index.core.schema import Document

SOURCE_KEY = "source"
"""Metadata key of a document's origin. It is shown with answers, but not in prompts."""

_SNIFFED_BYTES = 8192
_HTML = (".html", ".htm", ".xhtml")


@dataclass(slots=True)
class Loaded:
    """Documents, skipped files with the reason, and skipped links that lead out of their folder."""

    documents: list[Document] = field(default_factory=list)
    skipped: list[tuple[Path, str]] = field(default_factory=list)
    links: list[Path] = field(default_factory=list)


class UnreadableFileError(ValueError):
    """A file has no readable text. The message does not name the file."""


def load_documents(
    paths: Sequence[Path],
    *,
    exclude: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Loaded:
    """Read files, and every visible file in folders, with LlamaIndex's readers.

    Links in a folder are followed only if their target is in the folder. Otherwise, someone with
    write access to the folder could make this function read other files. Links in ``paths`` are
    always followed.

    Args:
        paths: Files and folders. A file in ``paths`` must be readable. An unreadable file in a
            folder is skipped and reported.
        exclude: Folder to skip, such as the database itself.
        on_progress: Called with (files read, all files).

    Raises:
        FileNotFoundError: A path does not exist.
        UnreadableFileError: A file in ``paths`` cannot be read or has no text, or no document was
            found.
    """
    loaded = Loaded()
    wanted: list[tuple[Path, bool]] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"no such file or folder: {path}")
        if path.is_file():
            wanted.append((path.resolve(), True))
            continue
        files, links = _below(path.resolve(), exclude and exclude.resolve())
        loaded.links += links
        wanted += ((file, False) for file in files)
    for done, (file, required) in enumerate(wanted, start=1):
        _add(loaded, file, required=required)
        if on_progress is not None:
            on_progress(done, len(wanted))
    if not loaded.documents:
        skipped = [*loaded.skipped, *((link, "a link out of the folder") for link in loaded.links)]
        first = "".join(f"; {file}: {reason}" for file, reason in skipped[:1])
        raise UnreadableFileError(
            f"found no readable document in {', '.join(map(str, paths))}, expected text, Markdown, "
            f"HTML or PDF{first}"
        )
    return loaded


def _add(loaded: Loaded, file: Path, *, required: bool) -> None:
    try:
        loaded.documents += _read(file)
    except UnreadableFileError as error:
        if required:
            raise UnreadableFileError(f"{file}: {error}") from error
        loaded.skipped.append((file, str(error)))


def _below(folder: Path, exclude: Path | None) -> tuple[list[Path], list[Path]]:
    """The visible files in a folder, and the links that lead out of it."""
    files, links = [], []
    for path in sorted(folder.rglob("*")):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        # Targets outside the folder are not accessed at all.
        if path.is_symlink() and not _target(path).is_relative_to(folder):
            links.append(path)
        elif path.is_file() and not (exclude and path.resolve().is_relative_to(exclude)):
            files.append(path)
    return files, links


def _target(link: Path) -> Path:
    """Target of a link, or the link itself if it leads in a circle."""
    try:
        return link.resolve()
    except (OSError, RuntimeError):  # RuntimeError before Python 3.13
        return link


def _read(file: Path) -> list[Document]:
    """Read one file into one document, or one document for each page of a PDF."""
    from llama_index.core import SimpleDirectoryReader

    own = _own_reader(file)
    if not own and file.suffix.lower() not in SimpleDirectoryReader.supported_suffix_fn():
        with file.open("rb") as raw:
            if b"\0" in raw.read(_SNIFFED_BYTES):
                raise UnreadableFileError(
                    "is binary, in an unknown format (text in UTF-16 must be saved as UTF-8)"
                )
    try:
        # By default, bytes that are not UTF-8 are dropped silently.
        found = SimpleDirectoryReader(
            input_files=[file],
            filename_as_id=True,
            raise_on_error=True,
            errors="strict",
            file_extractor=own,
        ).load_data()
    except Exception as error:
        # Readers are plugins for dozens of formats, which raise all kinds of errors.
        raise UnreadableFileError(f"cannot be read ({_cause(error)})") from error
    documents = [document for document in found if document.text.strip()]
    if not documents:
        raise UnreadableFileError("contains no text")
    for document in documents:
        set_source(document, str(file))
    return documents


def _own_reader(file: Path) -> dict[str, BaseReader]:
    """Return the ``file_extractor`` argument for a file.

    HTML files use this package's reader, because LlamaIndex would keep the tags. For other files,
    the result is empty, and LlamaIndex selects the reader.
    """
    if file.suffix.lower() not in _HTML:
        return {}
    from blockattn_rag.app.rag.html import HtmlReader

    return {file.suffix.lower(): HtmlReader()}


def _cause(error: BaseException) -> BaseException:
    """The cause of a reader's error. If a reader retries, the cause of its last attempt."""
    cause = error.__cause__ or error
    attempt = getattr(cause, "last_attempt", None)
    return (attempt.exception() if attempt else None) or cause


def set_source(document: Document, source: str) -> None:
    """Set a document's origin in its metadata, hidden from the LLM and the embedding model.

    The absolute path that SimpleDirectoryReader adds is hidden too. Otherwise, the KV of a passage
    would depend on the location of its file.
    """
    document.metadata[SOURCE_KEY] = source
    hidden = (SOURCE_KEY, "file_path")
    for keys in (document.excluded_llm_metadata_keys, document.excluded_embed_metadata_keys):
        keys.extend(key for key in hidden if key not in keys)
