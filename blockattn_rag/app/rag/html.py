"""Text of HTML pages, without tags, scripts and styles.

webencodings resolves the names of encodings as the WHATWG standard does. BeautifulSoup is not used:
its parsers in Python's standard library take time that grows with the square of the number of
unclosed tags, and refuse pages with ``<![`` (both in Python 3.11.7).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import webencodings
from llama_index.core.readers.base import BaseReader
from llama_index.core.schema import Document

_UNSEEN = frozenset(("script", "style", "template", "noscript", "svg"))
_INLINE = frozenset(
    (
        "a", "abbr", "b", "bdi", "bdo", "cite", "code", "data", "del", "dfn", "em", "font", "i",
        "ins", "kbd", "label", "mark", "q", "s", "samp", "small", "span", "strike", "strong", "sub",
        "sup", "time", "tt", "u", "var",
    )
)  # fmt: skip

# Matches one comment, declaration or tag. Every alternative can match to the end of the page, so no
# text is scanned twice.
_MARKUP = re.compile(
    r"""
      <!--(?:-?>|.*?(?:--!?>|\Z))
    | <(?:[!?]|/(?![a-z]))[^>]*(?:>|\Z)
    | <(?P<tag>/?[a-z][^\s/>]*)
       (?P<attributes>(?:[^>=]+|=\s*(?:"[^"]*(?:"|\Z)|'[^']*(?:'|\Z))?)*)
       (?:>|\Z)
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
# Elements whose content is text up to their end tag, even if it looks like markup.
_RAW = {
    name: re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE)
    for name in ("script", "style", "noscript", "title", "textarea")
}

# Code points have at most seven digits. Python refuses to convert numbers of thousands of digits.
_LONG_NUMBER = re.compile(r"&#([0-9]{8,})")
_CHARSET = re.compile(r"""charset\s*=\s*(?:["']\s*)?([^\s"'/;]+)""", re.IGNORECASE)
_READ_AS = {
    # A declaration in ASCII characters cannot be in UTF-16, so the standard reads UTF-8.
    "utf-16le": "utf-8",
    "utf-16be": "utf-8",
    "x-user-defined": "windows-1252",
    "gbk": "gb18030",
    # The standard shows nothing of pages in these obsolete encodings.
    "replacement": "",
}
"""Encodings that the HTML standard replaces when a page declares them."""


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
    for tag, content in _tokens(_decoded(page)):
        name = tag.removeprefix("/")
        is_end = tag != name
        is_empty = content.endswith("/")
        if hidden:
            if name == hidden and not is_empty:
                depth += -1 if is_end else 1
                hidden = hidden if depth else ""
        elif name in _UNSEEN:
            if not is_end and not is_empty:
                hidden, depth = name, 1
        elif name == "title":
            in_title = not is_end and not is_empty
        elif in_title:
            title = title or " ".join(_unescaped(content).split())
        elif not name:
            visible.add(_unescaped(content))
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
        self.preformatted = False
        self._cells: list[str] = []
        self._parts: list[str] = []

    def add(self, text: str) -> None:
        self._parts.append(text)

    def end_cell(self) -> None:
        text = "".join(self._parts)
        if not self.preformatted:
            text = " ".join(text.split())
        elif text:
            text = text.replace("\xa0", " ").expandtabs().rstrip().strip("\n")
        if text:
            self._cells.append(text)
        self._parts.clear()

    def end_line(self) -> None:
        self.end_cell()
        if self._cells:
            self.lines.append(" | ".join(self._cells))
        self._cells.clear()


def _tokens(page: str) -> Iterator[tuple[str, str]]:
    """Yield (tag, attributes) such as ``("p", "")`` or ``("/p", "")``, and text as ("", text)."""
    at = 0
    while markup := _MARKUP.search(page, at):
        yield "", page[at : markup.start()]
        at = markup.end()
        if markup["tag"] is None:
            continue
        tag, attributes = markup["tag"].lower(), markup["attributes"]
        yield tag, attributes
        if tag in _RAW and not attributes.endswith("/"):
            end = _RAW[tag].search(page, at)
            until = end.start() if end else len(page)
            yield "", page[at:until]
            at = until
    yield "", page[at:]


def _unescaped(text: str) -> str:
    """Replace character references. Numbers of no character become U+FFFD, as in browsers."""
    return unescape(_LONG_NUMBER.sub(lambda found: f"&#{found[1].lstrip('0')[:8] or 0}", text))


def _decoded(page: bytes) -> str:
    """Decode a page, with ``\\n`` as line breaks."""
    label = _declared_encoding(page)
    encodings = ("utf-8",) if label else ("utf-8", "windows-1252")
    refusal = "declares no encoding, and is neither UTF-8 nor windows-1252"
    if encoding := _known_encoding(label):
        encodings = (encoding,)
        refusal = f"contains bytes that are invalid in its encoding, {encoding}"
    elif label:
        refusal = f"declares an unknown encoding, {label!r:.80}"
    for encoding in encodings:
        with contextlib.suppress(UnicodeDecodeError):
            # A byte order mark takes precedence over the encoding.
            text, _ = webencodings.decode(page, encoding, "strict")
            break
    else:
        raise ValueError(f"{refusal}; save and declare it as UTF-8")
    if "\0" in text:
        raise ValueError(
            "contains NUL characters: it is binary, or UTF-16 without a byte order mark; "
            "save it as UTF-8"
        )
    return str(text).replace("\r\n", "\n").replace("\r", "\n")


def _declared_encoding(page: bytes) -> str:
    """The encoding that a page declares, or an empty string."""
    text = page.decode("latin-1")
    for tag, attributes in _tokens(text):
        if tag == "body":
            break
        if tag != "meta" or (
            # A meta description may mention a charset too.
            re.search(r"\bcontent\s*=", attributes, re.IGNORECASE)
            and not re.search("http-equiv", attributes, re.IGNORECASE)
        ):
            continue
        if charset := _CHARSET.search(attributes):
            return charset[1]
    xml = re.match(r"<\?xml\s[^>]*?\sencoding\s*=\s*[\"']([^\"'>]+)", text)
    return xml[1] if xml else ""


def _known_encoding(label: str) -> str:
    """Name of a declared encoding in the standard, or an empty string if it is unknown."""
    found = webencodings.lookup(label)
    return _READ_AS.get(found.name, found.name) if found else ""
