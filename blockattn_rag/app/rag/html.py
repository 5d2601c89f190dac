"""Text of HTML pages, without tags, scripts and styles.

turbohtml's tokenizer takes linear time on every page. lxml 6.1 and selectolax 1.0 track open
elements, which takes quadratic time on deeply nested pages. webencodings decodes strictly, while
turbohtml replaces invalid bytes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import webencodings
from llama_index.core.readers.base import BaseReader
from llama_index.core.schema import Document
from turbohtml import Token, TokenType, tokenize

_UNSEEN = frozenset(
    ("iframe", "noembed", "noframes", "noscript", "script", "style", "svg", "template")
)
_INLINE = frozenset(
    (
        "a", "abbr", "b", "bdi", "bdo", "cite", "code", "data", "del", "dfn", "em", "font", "i",
        "ins", "kbd", "label", "mark", "q", "s", "samp", "small", "span", "strike", "strong", "sub",
        "sup", "time", "tt", "u", "var",
    )
)  # fmt: skip
# Empty elements of XHTML that HTML would read as start tags of text without markup.
_EMPTY = re.compile(
    r"<(?:iframe|noembed|noframes|noscript|script|style|textarea|title)(?:\s[^<>]*[\s\"'])?/>",
    re.IGNORECASE,
)
_CHARSET = re.compile(r"""charset\s*=\s*(?:["']\s*)?([^\s"'/;]+)""", re.IGNORECASE)
_READ_AS = {
    # A declaration in ASCII characters cannot be in UTF-16, so the standard reads UTF-8.
    "utf-16le": "utf-8",
    "utf-16be": "utf-8",
    "x-user-defined": "windows-1252",
    "gbk": "gb18030",
    # The standard shows nothing of pages in these obsolete encodings.
    "replacement": "utf-8",
}
"""Encodings that are replaced when a page declares them, mostly by the HTML standard."""


class HtmlReader(BaseReader):
    """Reader that converts each HTML file to one document."""

    def load_data(self, file: Path, extra_info: dict[str, Any] | None = None) -> list[Document]:
        return [Document(text=html_text(Path(file).read_bytes()), metadata=extra_info or {})]


def html_text(page: bytes) -> str:
    """Extract the title and visible text of a page, one line per block element.

    The encoding is chosen as in browsers, from the first that applies: the byte order mark, the
    declaration in the page, UTF-8, windows-1252.

    Raises:
        ValueError: The page is not in this encoding, or declares an unknown encoding.
    """
    title, in_title, hidden, depth = "", False, "", 0
    visible = _Lines()
    for token in _tokens(_decoded(page)):
        name, is_end = token.tag, token.type == TokenType.END_TAG
        if hidden:
            if name == hidden and not token.self_closing:
                depth += -1 if is_end else 1
                hidden = hidden if depth else ""
        elif name is None:
            text = (token.type == TokenType.TEXT and token.data) or ""
            if in_title:
                title = title or " ".join(text.split())
            else:
                visible.parts.append(text)
        elif name in _UNSEEN:
            if not is_end and not token.self_closing:
                hidden, depth = name, 1
        elif name == "title":
            in_title = not is_end
        elif name in ("td", "th"):
            visible.end_cell()
        elif name not in _INLINE:
            visible.end_line()
            if name == "pre":
                visible.preformatted = not is_end
    visible.end_line()
    return "\n".join(filter(None, (title, *visible.lines)))


class _Lines:
    """Non-blank lines of text. Table cells are separated by bars."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.parts: list[str] = []
        self.preformatted = False
        self._cells: list[str] = []

    def end_cell(self) -> None:
        text = "".join(self.parts)
        if self.preformatted:
            text = text.replace("\xa0", " ").expandtabs().rstrip().strip("\n")
        else:
            text = " ".join(text.split())
        if text:
            self._cells.append(text)
        self.parts.clear()

    def end_line(self) -> None:
        self.end_cell()
        if self._cells:
            self.lines.append(" | ".join(self._cells))
        self._cells.clear()


def _tokens(page: str) -> Iterator[Token]:
    return tokenize(_EMPTY.sub("", page))


def _decoded(page: bytes) -> str:
    label = _declared_encoding(page)
    known = webencodings.lookup(label)
    encodings = [_READ_AS.get(known.name, known.name) if known else "utf-8"]
    if not label:
        encodings.append("windows-1252")
    for encoding in encodings:
        with contextlib.suppress(UnicodeDecodeError):
            # A byte order mark takes precedence over the encoding.
            text, _ = webencodings.decode(page, encoding, "strict")
            break
    else:
        raise ValueError(
            f"declares {f'the encoding {label!r:.80}' if label else 'no encoding'}, and contains "
            f"bytes that are invalid in {' and '.join(encodings)}; save and declare it as UTF-8"
        )
    if "\0" in text:
        raise ValueError(
            "contains NUL characters: it is binary, or UTF-16 without a byte order mark; "
            "save it as UTF-8"
        )
    return str(text)


def _declared_encoding(page: bytes) -> str:
    """The encoding that a page declares, or an empty string."""
    text = page.decode("latin-1")
    for token in _tokens(text):
        if token.tag == "body":
            break
        if token.tag == "meta":
            if label := (token.attr("charset") or "").strip():
                return label
            # A meta description may mention a charset too.
            is_type = (token.attr("http-equiv") or "").lower() == "content-type"
            if is_type and (charset := _CHARSET.search(token.attr("content") or "")):
                return charset[1]
    xml = re.match(r"<\?xml\s[^>]*?\sencoding\s*=\s*[\"']([^\"'>]+)", text)
    return xml[1] if xml else ""
