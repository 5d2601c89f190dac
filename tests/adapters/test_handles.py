"""Handles in the metadata of a vector store, which other programs may also write."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document
from llama_index.core.schema import TextNode

from blockattn_rag.adapters.handles import DIGEST_KEY, HANDLE_KEY, digest_of, live_handles


class Collection:
    """The methods of a Chroma collection that ``live_handles`` calls."""

    def __init__(self, *metadatas: dict[str, Any] | None) -> None:
        self.metadatas = list(metadatas)

    def count(self) -> int:
        return len(self.metadatas)

    def get(self, *, limit: int, offset: int, include: list[str]) -> dict[str, Any]:
        page = self.metadatas[offset : offset + limit]
        return {"metadatas": page, "documents": ["text"] * len(page)}


def test_non_string_handles_are_ignored() -> None:
    odd = [{HANDLE_KEY: value} for value in (["a", "list"], {"a": 1}, 7, True, None, "")]
    assert live_handles([Collection(*odd, None, {}, {HANDLE_KEY: "a" * 32})]) == {"a" * 32}


def test_large_collections_are_read_page_by_page() -> None:
    many = [{HANDLE_KEY: f"{i:032x}"} if i % 2 else {"other": 1} for i in range(2050)]
    assert len(live_handles([Collection(*many), Collection({HANDLE_KEY: "f" * 32})])) == 1026


def test_a_non_string_digest_makes_a_handle_stale() -> None:
    assert live_handles([Collection({HANDLE_KEY: "a" * 32, DIGEST_KEY: ["x"]})]) == set()


def test_handles_are_read_from_passages_of_both_frameworks_and_from_metadata() -> None:
    one, two, three = ({HANDLE_KEY: letter * 32} for letter in "abc")
    given = [Document("text", metadata=one), TextNode(text="text", metadata=two), three, {}]
    assert live_handles(given) == {"a" * 32, "b" * 32, "c" * 32}


def test_a_document_with_changed_text_has_a_stale_handle() -> None:
    metadata = {HANDLE_KEY: "a" * 32, DIGEST_KEY: digest_of({"page_content": "old"})}
    assert live_handles([Document("old", metadata=metadata)]) == {"a" * 32}
    assert live_handles([Document("new", metadata=metadata)]) == set()
    # Without the text, a stale handle cannot be detected, so it is kept to be safe.
    assert live_handles([metadata]) == {"a" * 32}


def test_unsupported_sources_raise_type_error() -> None:
    with pytest.raises(TypeError, match="Expected a Chroma collection, a document, a node"):
        live_handles(["a" * 32])
