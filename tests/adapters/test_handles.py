"""Handles in a vector store's metadata, which others write too."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document
from llama_index.core.schema import TextNode

from blockattn_rag.adapters.handles import DIGEST_KEY, HANDLE_KEY, digest_of, live_handles


class Collection:
    """As much of a Chroma collection as is asked for handles."""

    def __init__(self, *metadatas: dict[str, Any] | None) -> None:
        self.metadatas = list(metadatas)

    def count(self) -> int:
        return len(self.metadatas)

    def get(self, *, limit: int, offset: int, include: list[str]) -> dict[str, Any]:
        page = self.metadatas[offset : offset + limit]
        return {"metadatas": page, "documents": ["text"] * len(page)}


def test_handles_that_are_no_strings_are_ignored() -> None:
    odd = [{HANDLE_KEY: value} for value in (["a", "list"], {"a": 1}, 7, True, None, "")]
    assert live_handles([Collection(*odd, None, {}, {HANDLE_KEY: "a" * 32})]) == {"a" * 32}


def test_a_digest_that_is_no_string_makes_a_handle_stale() -> None:
    assert live_handles([Collection({HANDLE_KEY: "a" * 32, DIGEST_KEY: ["x"]})]) == set()


def test_passages_of_both_frameworks_and_their_metadata_have_handles() -> None:
    one, two, three = ({HANDLE_KEY: letter * 32} for letter in "abc")
    given = [Document("text", metadata=one), TextNode(text="text", metadata=two), three, {}]
    assert live_handles(given) == {"a" * 32, "b" * 32, "c" * 32}


def test_a_document_with_a_replaced_text_has_a_stale_handle() -> None:
    metadata = {HANDLE_KEY: "a" * 32, DIGEST_KEY: digest_of({"page_content": "old"})}
    assert live_handles([Document("old", metadata=metadata)]) == {"a" * 32}
    assert live_handles([Document("new", metadata=metadata)]) == set()
    # Without its text nobody can tell, and keeping too much is no loss.
    assert live_handles([metadata]) == {"a" * 32}


def test_places_without_passages_raise_type_error() -> None:
    with pytest.raises(TypeError, match="Expected a Chroma collection, a document, a node"):
        live_handles(["a" * 32])
