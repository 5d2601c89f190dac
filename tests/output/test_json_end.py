"""Where JSON ends in a text that grows."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockattn_rag.output.json_end import JsonEnd

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
).filter(lambda value: isinstance(value, (dict, list)))


@given(VALUES, st.text(max_size=5))
def test_a_value_ends_where_its_own_bracket_closes(value: object, after: str) -> None:
    text, end = json.dumps(value), JsonEnd()
    assert all(end.of_value(text[:size]) is None for size in range(len(text)))
    assert end.of_value(text + after) == len(text)


def test_a_mark_counts_outside_of_strings_alone() -> None:
    text = '{"a": "</x>"} </x>'
    assert JsonEnd().before("</x>", text, final=False) == text.rindex("</x>")


@pytest.mark.parametrize(("final", "at"), [(False, None), (True, None)])
def test_the_beginning_of_a_mark_is_waited_for(final: bool, at: int | None) -> None:
    end = JsonEnd()
    assert end.before("</x>", "{} </", final=final) == at
    if not final:
        assert end.before("</x>", "{} </x>", final=False) == 3


def test_a_string_that_was_never_closed_ends_with_its_line() -> None:
    assert JsonEnd().before("</x>", '{"a": "b}\n</x>', final=False) == 10


def test_it_begins_where_it_is_told() -> None:
    assert JsonEnd(3).of_value("}] {}") == 5
