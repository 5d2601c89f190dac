from __future__ import annotations

import pytest

from blockattn_rag.app.rag.html import html_text


@pytest.mark.parametrize(
    "page",
    [
        "<head><title>T</title><body><p>Hello</p>",
        "<title>T</title><p>Hello</p>",
        "<html><head><title>\n T\n</title></head><p>Hello</html>",
        "<svg><title>Icon</title></svg><title>T</title>Hello<title>again</title>",
        "<TITLE lang='>'>T</TITLE >Hello",
    ],
)
def test_title_and_body_are_read_once_without_optional_tags(page: str) -> None:
    assert html_text(page.encode()) == "T\n\nHello"


def test_tabs_of_the_source_are_spaces() -> None:
    assert html_text(b"<p>Hello\n\t\tworld\t!<p>\n\t<b>a</b>\t<i>b</i>") == "Hello world !\n\na b"


@pytest.mark.parametrize(
    "page",
    [
        "<table><tr><td>a<td>b<tr><th>c<th>d</table>",
        "<table><tr><td>a</td>\n\t<td>b</td></tr><tr><th>c</th><th>d</th></tr></table>",
    ],
)
def test_cells_are_separated_with_and_without_end_tags(page: str) -> None:
    assert html_text(page.encode()) == "a | b\nc | d"


def test_vertical_bars_in_text_are_kept() -> None:
    assert html_text(b"<p>| x | y |</p>") == "| x | y |"


def test_preformatted_text_keeps_its_lines_and_indentation() -> None:
    page = (
        b"<p>Run\n<pre class=code>\r\nif <b>a</b> &lt; b:\r\n\tgo()\r\n\r\n&nbsp; end\r\n</pre>now"
    )
    assert html_text(page) == "Run\n\nif a < b:\n\tgo()\n\n  end\n\nnow"


@pytest.mark.parametrize(
    "hidden",
    [
        "<script>if (a < b) '<p>x</p>'</script>",
        "<SCRIPT src=x></script\n>",
        '<script src="x"/>',
        "<style>p > a {}</style>",
        "<noscript><p>x</noscript>",
        "<iframe><p>x</p></iframe>",
        "<noframes><p>x</noframes>",
        "<noembed>x</noembed>",
        "<script><!--<script>x</script>x--></script>",
        "<template><template>x</template><p>x</template>",
        "<svg><g><text>x</text></g></svg>",
        '<svg width="1"/>',
        "<svg class=icon/>x</svg>",
        "<!-- <p>x</p> > -->",
        "<!-->",
        "<!doctype html>",
        "<?php x ?>",
        "<![if IE]>",
        "</>",
        "</ x>",
        "<a title=\"a > b\" data-x='>' href=it's>",
    ],
)
def test_invisible_elements_are_left_out(hidden: str) -> None:
    assert html_text(f"<p>be{hidden}fore</p>".encode()) == "before"


def test_angle_brackets_outside_of_tags_are_text() -> None:
    assert html_text(b"1 < 2 & 3 <4 &amp;lt; &eacute;&#8364;") == "1 < 2 & 3 <4 &lt; \u00e9\u20ac"


@pytest.mark.parametrize(
    ("page", "text"),
    [
        (b"<p>a</p>\x80\xff", "a\n\n\u20ac\u00ff"),
        ("<p>\u017e \u20ac".encode(), "\u017e \u20ac"),
        ("\ufeff<meta charset=latin1>\u017e".encode(), "\u017e"),
        ("\ufeff<p>\u017e".encode("utf-16-le"), "\u017e"),
        ("\ufeff<p>\u017e".encode("utf-16-be"), "\u017e"),
        (b"<meta charset='ISO-8859-1'>\x80\xe9", "\u20ac\u00e9"),
        (b"<meta charset=utf-16>\xc5\xbe", "\u017e"),
        (b'<META content="text/html; charset=iso-8859-2" http-equiv=Content-Type>\xbe', "\u017e"),
        ("<meta charset=gb2312>\u9555".encode("gbk"), "\u9555"),
        (b'<?xml version="1.0" encoding="iso-8859-2"?><p>\xbe</p>', "\u017e"),
        (b"<style/><script src='x'/><meta charset='iso-8859-2' />\xbe", "\u017e"),
        (b"<!-- <meta charset=koi8-r> --><meta name=x content='charset=koi8-r'>\xe9", "\u00e9"),
        (b"<?xml version='1.0' encoding='utf-16'?>\xc5\xbe", "\u017e"),
        (b"<meta charset=unheard-of>\xc5\xbe", "\u017e"),
    ],
)
def test_pages_are_decoded_as_browsers_do(page: bytes, text: str) -> None:
    assert html_text(page) == text


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (b"<p>\x81\xff", "windows-1252"),
        (b"<meta charset=utf-8>\xff", "UTF-8"),
        (b"<?xml version='1.0' encoding='utf-8'?>\xff", "UTF-8"),
        ("<p>\u017e".encode("utf-16-le"), "UTF-16"),
    ],
)
def test_bytes_that_are_not_in_the_encoding_are_refused(page: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}.*save .*as UTF-8"):
        html_text(page)


HOSTILE = {
    **{part: part * 20_000 for part in (
        "<p>unclosed", "<td>", "<b>", "<!--", "<a ", "<a b='", "<a b=", "<![CDATA[", "</", "<svg>",
        "<script>", "<title>", "<pre>", "<", "&#", "<meta charset=", "<a/", "<![", "<?", "<b>x</i>",
        "&", "</p>", "<a b=\"", "<ul><li>",
    )},
    "deep nesting": "<div>" * 200_000,
    "unmatched end tags": "<span>" * 200_000 + "</div>" * 200_000,
    "many attributes": f"<a {' '.join(f'a{n}' for n in range(200_000))}>",
    "long attribute": f"<a title='{'x' * 1_000_000}'>",
    "charset and spaces": f"<meta charset={' ' * 200_000};>",
    "charset, quote and spaces": f"<meta charset={' ' * 100_000}\"{' ' * 100_000};>",
    "http-equiv and spaces": f"<meta content={' ' * 200_000} charset{' ' * 200_000}http-equiv>",
    "XML and spaces": f"<?xml {'encoding ' * 50_000}{' ' * 100_000}",
    "nested tags": "<div>" * 20_000 + "</div>" * 20_000,
}  # fmt: skip


@pytest.mark.timeout(60)  # ample for linear time, far too little for quadratic time
@pytest.mark.parametrize("page", HOSTILE.values(), ids=HOSTILE)
def test_hostile_pages_take_linear_time(page: str) -> None:
    assert "before" in html_text(f"<p>before</p>{page}".encode())


@pytest.mark.parametrize(
    ("reference", "character"),
    [
        ("&#" + "1" * 4_301 + ";", "\ufffd"),
        ("&#" + "9" * 8, "\ufffd"),
        ("&#x" + "f" * 10_000 + ";", "\ufffd"),
        ("&#" + "0" * 5_000 + "65;", "A"),
        ("&#" + "0" * 5_000 + ";", "\ufffd"),
        ("&#128512;", "\U0001f600"),
    ],
)
def test_a_long_character_reference_is_one_character(reference: str, character: str) -> None:
    assert html_text(f"<p>a{reference}</p>".encode()) == f"a{character}"


@pytest.mark.parametrize("label", ["unicode_escape", "idna", "rot13", "utf-7", "cp037"])
def test_codecs_that_are_not_page_encodings_are_not_applied(label: str) -> None:
    assert html_text(f"<meta charset={label}>\\u0041 +AGE-".encode()) == "\\u0041 +AGE-"
