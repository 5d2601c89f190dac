"""Reads files into LlamaIndex documents."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llama_index.core.schema import Document

SOURCE_KEY = "source"
"""Metadata key of a document's source, which is shown with answers, but not in prompts."""

_SNIFFED_BYTES = 8192
_BYTE_ORDER_MARK = "\ufeff"
_HTML = (".html", ".htm", ".xhtml")


@dataclass(slots=True)
class Loaded:
    """Result of ``load_documents``.

    Args:
        skipped: Files without readable text, with reasons.
        inaccessible: Files and folders that could not be opened, with reasons: no permission,
            deleted, or on a damaged disk.
        links: Skipped symbolic links to targets outside the folder that was read.
    """

    documents: list[Document] = field(default_factory=list)
    skipped: list[tuple[Path, str]] = field(default_factory=list)
    inaccessible: list[tuple[Path, str]] = field(default_factory=list)
    links: list[Path] = field(default_factory=list)


class UnreadableFileError(ValueError):
    """Raised if a file has no readable text. ``load_documents`` adds the file's name."""


def load_documents(
    paths: Sequence[Path],
    *,
    exclude: Path | None = None,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> Loaded:
    """Read files, and all visible files in folders, with LlamaIndex's readers or ``HtmlReader``.

    In a folder, links to files are followed only if their target is also in the folder. Otherwise,
    anyone with write access to the folder could make this function read other files. Links in
    ``paths`` are always followed.

    Args:
        paths: Files and folders. Files and folders that cannot be opened are skipped and reported.
        exclude: Folder to ignore, for example the database.
        on_progress: Called with the numbers of files read so far and in total.

    Raises:
        FileNotFoundError: A path does not exist.
        UnreadableFileError: A file in ``paths`` has no readable text, or no document was read.
            In a folder, files without readable text are skipped and reported.
    """
    loaded = Loaded()
    queue: list[tuple[Path, bool]] = []
    for path in paths:
        try:
            is_file = stat.S_ISREG(path.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(f"No such file or folder: {path}") from None
        except OSError as error:
            loaded.inaccessible.append((path, _reason(error)))
            continue
        if is_file:
            queue.append((path.resolve(), True))
            continue
        files = _below(path.resolve(), exclude and exclude.resolve(), loaded)
        queue += ((file, False) for file in files)
    for done, (file, required) in enumerate(queue, start=1):
        try:
            loaded.documents += _read(file)
        except OSError as error:
            loaded.inaccessible.append((file, _reason(error)))
        except UnreadableFileError as error:
            if required:
                raise UnreadableFileError(f"{file}: {error}") from error
            loaded.skipped.append((file, str(error)))
        on_progress(done, len(queue))
    if not loaded.documents:
        links = ((link, "a link pointing outside the folder") for link in loaded.links)
        skipped = [*loaded.inaccessible, *loaded.skipped, *links]
        first = "".join(f"; {file}: {reason}" for file, reason in skipped[:1])
        raise UnreadableFileError(
            f"No readable document in {', '.join(map(str, paths))}, expected text, Markdown, HTML "
            f"or PDF{first}"
        )
    return loaded


def _reason(error: OSError) -> str:
    return f"cannot be opened ({error.strerror or error})"


def _below(folder: Path, exclude: Path | None, loaded: Loaded) -> list[Path]:
    """List a folder's visible files, sorted. Adds links and inaccessible paths to ``loaded``."""

    def failed(error: OSError) -> None:
        loaded.inaccessible.append((Path(error.filename or folder), _reason(error)))

    files = []
    for place, folders, names in os.walk(folder, onerror=failed):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(place, name) for name in (*folders, *names) if not name.startswith(".")):
            try:
                # Unlike Path.resolve, os.path.realpath accepts circular links.
                if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(folder):
                    loaded.links.append(path)
                elif _is_file(path) and not (exclude and path.resolve().is_relative_to(exclude)):
                    files.append(path)
            except OSError as error:
                failed(error)
    loaded.links.sort()
    return sorted(files)


def _is_file(path: Path) -> bool:
    """Whether a path is a file. Unlike ``Path.is_file``, raises OSError if it is inaccessible."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        if path.is_symlink() and not isinstance(error, PermissionError):
            return False  # The link is broken or circular.
        raise


def _read(file: Path) -> list[Document]:
    from llama_index.core import SimpleDirectoryReader
    from llama_index.core.readers.base import BaseReader

    suffix, own = file.suffix.lower(), dict[str, BaseReader]()
    if suffix in _HTML:  # LlamaIndex's reader would keep the tags.
        from blockattn_rag.app.rag.html import HtmlReader

        own[suffix] = HtmlReader()
    with file.open("rb") as raw:
        start = raw.read(_SNIFFED_BYTES)
    is_plain = not own and suffix not in SimpleDirectoryReader.supported_suffix_fn()
    if is_plain and b"\0" in start:
        raise UnreadableFileError("is binary, in an unknown format (save UTF-16 text as UTF-8)")
    try:
        # By default, invalid UTF-8 is dropped silently.
        pages = SimpleDirectoryReader(
            input_files=[file],
            filename_as_id=True,
            raise_on_error=True,
            errors="strict",
            file_extractor=own,
        ).load_data()
    except Exception as error:
        cause = _cause(error)
        if isinstance(cause, FileNotFoundError | PermissionError):
            raise cause from error
        # Readers are plugins for dozens of formats, which may raise any exception.
        raise UnreadableFileError(f"cannot be read ({cause})") from error
    for document in pages:
        document.set_content(document.text.removeprefix(_BYTE_ORDER_MARK))
    documents = [document for document in pages if document.text.strip()]
    if not documents:
        raise UnreadableFileError("contains no text")
    for document in documents:
        set_source(document, str(file))
    return documents


def _cause(error: BaseException) -> BaseException:
    """Return the cause of a reader's error or, if the reader retried, of its last attempt."""
    cause = error.__cause__ or error
    attempt = getattr(cause, "last_attempt", None)
    return (attempt.exception() if attempt else None) or cause


def set_source(document: Document, source: str) -> None:
    """Set a document's source in its metadata, hidden from the LLM and the embedding model.

    The absolute path added by SimpleDirectoryReader is hidden, too. Otherwise, a passage's block
    would depend on the location of its file.
    """
    document.metadata[SOURCE_KEY] = source
    hidden = (SOURCE_KEY, "file_path")
    for keys in (document.excluded_llm_metadata_keys, document.excluded_embed_metadata_keys):
        keys.extend(key for key in hidden if key not in keys)
