"""Text of HTML pages: what a reader sees, without tags, scripts and styles."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bs4 import BeautifulSoup
from llama_index.core.readers.base import BaseReader
from llama_index.core.schema import Document

_UNSEEN = ("script", "style", "template", "noscript", "svg", "head")
_INLINE = frozenset(
    (
        "a", "abbr", "b", "bdi", "bdo", "cite", "code", "data", "del", "dfn", "em", "font", "i",
        "ins", "kbd", "label", "mark", "q", "s", "samp", "small", "span", "strike", "strong", "sub",
        "sup", "time", "tt", "u", "var",
    )
)  # fmt: skip


class HtmlReader(BaseReader):
    """Reader of HTML files, one document each."""

    def load_data(self, file: Path, extra_info: dict[str, Any] | None = None) -> list[Document]:
        return [Document(text=html_text(Path(file).read_bytes()), metadata=extra_info or {})]


def html_text(page: bytes) -> str:
    """The title and the visible text of a page; blocks and cells are separated, inline tags not.

    Raises:
        ValueError: Bytes that the page's encoding does not have.
    """
    soup = BeautifulSoup(page, "html.parser")
    if soup.contains_replacement_characters:
        raise ValueError(
            f"bytes that are not in its encoding, {soup.original_encoding}; save it as UTF-8"
        )
    title = soup.title.get_text(" ", strip=True) if soup.title else ""
    for tag in soup.find_all(_UNSEEN):
        tag.decompose()
    for kept in soup.find_all("pre"):
        for text in kept.find_all(string=True):
            text.replace_with(text.expandtabs().replace("\n", _LINE).replace(" ", _SPACE))
    for tag in soup.find_all(True):
        if tag.name in ("td", "th"):
            tag.insert_after("\t")
        elif tag.name not in _INLINE:
            tag.insert_before(_BREAK)
            tag.insert_after(_BREAK)
    return "\n".join(filter(None, (title, _tidy(soup.get_text()))))


# Between blocks; line breaks and spaces of preformatted text. Pages have no use for them.
_BREAK, _LINE, _SPACE = "\x00", "\x01", "\x02"


def _tidy(text: str) -> str:
    """The lines of a text, without blank ones; cells of a table are separated by bars."""
    words = re.sub(r"[^\S\t]+", " ", text)
    words = re.sub(r" ?\t[\t ]*", " | ", words)
    lines = (line.strip(f" |{_LINE}") for line in words.split(_BREAK))
    return "\n".join(filter(None, lines)).replace(_LINE, "\n").replace(_SPACE, " ")
