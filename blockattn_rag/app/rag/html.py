"""Text extraction from HTML pages, without tags, scripts and styles.

Pages are parsed with turbohtml, which takes linear time. On deeply nested pages, lxml 6.1 and
selectolax 1.0 take quadratic time.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import webencodings
from llama_index.core.readers.base import BaseReader
from llama_index.core.schema import Document
from turbohtml import PlainText, parse

_LAYOUT = PlainText(layout="strict", table_cell_separator=" | ", bullet="")
_WIDER = {"GBK": "gb18030"}
"""Encodings that the HTML standard decodes as a superset."""
_UNSEEN = "iframe, noembed, noframes, noscript, svg, template"
"""Elements whose text ``to_text`` includes, although browsers do not display it."""
# Empty XHTML elements that HTML would parse as start tags of raw text.
_EMPTY = re.compile(
    rb"<(?:iframe|noembed|noframes|noscript|script|style|textarea|title)(?:\s[^<>]*[\s\"'])?/>",
    re.IGNORECASE,
)
_XML = re.compile(rb"<\?xml\s[^>]*?\sencoding\s*=\s*[\"']([^\"'>]+)")


class HtmlReader(BaseReader):
    """Reader that converts each HTML file to one document."""

    def load_data(self, file: Path, extra_info: dict[str, Any] | None = None) -> list[Document]:
        return [Document(text=html_text(Path(file).read_bytes()), metadata=extra_info or {})]


def html_text(page: bytes) -> str:
    """Extract a page's title and visible text. Raises ValueError for invalid or binary text."""
    declared = _XML.match(page)
    known = webencodings.lookup(declared[1].decode("latin-1")) if declared else None
    # A page whose declaration is readable as ASCII cannot be UTF-16.
    label = known.name if known and not known.name.startswith("utf-16") else None
    document = parse(_EMPTY.sub(b"", page), encoding=label, scripting=True)
    encoding = document.encoding or "utf-8"
    try:
        # turbohtml would replace invalid bytes.
        text, _ = webencodings.decode(page, _WIDER.get(encoding, encoding), "strict")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"contains bytes that are invalid in its encoding, {encoding}; save and declare it as "
            "UTF-8"
        ) from error
    if "\0" in text:
        raise ValueError(
            "contains NUL characters: it is binary, or UTF-16 without a byte order mark; "
            "save it as UTF-8"
        )
    for element in document.select(_UNSEEN):
        element.decompose()
    title = document.select_one("title")
    heading = " ".join(title.text.split()) if title else ""
    return f"{heading}\n\n{document.to_text(_LAYOUT)}".replace("\xa0", " ").strip()
