"""Text of HTML pages, without tags, scripts and styles.

BeautifulSoup is not used: it guesses encodings instead of refusing unknown ones, and on hostile
pages the time of its parser, ``html.parser``, grows with the square of their size.
"""

from __future__ import annotations

import codecs
import contextlib
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

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

_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# The HTML standard reads these encodings as their supersets. A declaration in ASCII characters
# cannot be in UTF-16, so the standard reads such a page as UTF-8.
_SUPERSETS = {
    "ascii": "windows-1252",
    "iso8859-1": "windows-1252",
    "iso8859-9": "windows-1254",
    "iso8859-11": "cp874",
    "tis-620": "cp874",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "big5": "big5hkscs",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "utf-16": "utf-8",
    "utf-16-le": "utf-8",
    "utf-16-be": "utf-8",
}


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
            title = title or " ".join(unescape(content).split())
        elif not name:
            visible.add(unescape(content))
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


def _decoded(page: bytes) -> str:
    """Decode a page, with ``\\n`` as line breaks."""
    for mark, encoding in _MARKS:
        if page.startswith(mark):
            text = _decoded_as(encoding, page[len(mark) :])
            break
    else:
        text = _decoded_without_mark(page)
    if "\0" in text:
        raise ValueError(
            "contains NUL characters: it is binary, or UTF-16 without a byte order mark; "
            "save it as UTF-8"
        )
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _decoded_without_mark(page: bytes) -> str:
    label = _declared_encoding(page)
    encoding = _known_encoding(label)
    if encoding:
        return _decoded_as(encoding, page)
    for encoding in ("utf-8",) if label else ("utf-8", "windows-1252"):
        with contextlib.suppress(UnicodeDecodeError):
            return page.decode(encoding)
    if label:
        raise ValueError(f"declares an unknown encoding, {label!r}; save and declare it as UTF-8")
    raise ValueError(
        "declares no encoding, and is neither UTF-8 nor windows-1252; save it as UTF-8"
    )


def _decoded_as(encoding: str, page: bytes) -> str:
    try:
        return page.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"contains bytes that are invalid in its encoding, {encoding}; save it as UTF-8"
        ) from error


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
        charset = re.search(r"charset\s*=\s*[\"']?\s*([^\s\"'/;]+)", attributes, re.IGNORECASE)
        if charset:
            return charset[1]
    xml = re.match(r"<\?xml\s[^>]*?\sencoding\s*=\s*[\"']([^\"'>]+)", text)
    return xml[1] if xml else ""


def _known_encoding(label: str) -> str:
    """Python's name of a declared encoding, or an empty string if it is unknown."""
    try:
        name = codecs.lookup(label).name
        name = _SUPERSETS.get(name, name)
        # The declaration was readable as ASCII, which rules out base64, EBCDIC and so on.
        return name if b"<".decode(name) == "<" else ""
    except (LookupError, ValueError):
        return ""
