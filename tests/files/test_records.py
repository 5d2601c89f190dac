from __future__ import annotations

from typing import Any

import pytest

from blockattn_rag.errors import DataError
from blockattn_rag.files import list_of, not_blank, of_kind, text_of, value_of


def test_fields_that_are_as_expected_come_back_as_they_are() -> None:
    record = {"text": " a ", "list": [1], "none": [], "flag": False}
    assert text_of(record, "text") == " a "
    assert list_of(record, "list") == [1]
    assert list_of(record, "none", may_be_empty=True) == []
    assert of_kind(record["flag"], bool, "'flag'") is False


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "found no 'turns[1].text' among the keys none"),
        ({"b": 1, "a": 2}, "found no 'turns[1].text' among the keys 'a', 'b'"),
        ({"text": 3.5}, "found 'turns[1].text' of a number, expected a string"),
        ({"text": None}, "found 'turns[1].text' of null, expected a string"),
        ({"text": True}, "found 'turns[1].text' of true or false, expected a string"),
        ({"text": "\n "}, "found an empty 'turns[1].text', expected text"),
    ],
)
def test_a_text_that_is_none_is_named_with_its_place(record: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as raised:
        text_of(record, "text", "turns[1].")
    assert str(raised.value) == message


def test_other_kinds_and_empty_lists_are_named() -> None:
    with pytest.raises(DataError, match="found a record of a list, expected an object"):
        of_kind([], dict, "a record")
    with pytest.raises(DataError, match="found 'a' of an object, expected a list"):
        list_of({"a": {}}, "a")
    with pytest.raises(DataError, match="found an empty list 'a'"):
        list_of({"a": []}, "a")
    with pytest.raises(DataError, match=r"found an empty answers\[0\], expected text"):
        not_blank("", "answers[0]")
    with pytest.raises(DataError, match="found no 'b'"):
        value_of({}, "b")
