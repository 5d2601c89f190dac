"""Handles in a vector store's metadata, which others write too."""

from __future__ import annotations

from typing import Any

from blockattn_rag.adapters.handles import DIGEST_KEY, HANDLE_KEY, live_handles


class Collection:
    """As much of a Chroma collection as is asked for handles."""

    def __init__(self, *metadatas: dict[str, Any] | None) -> None:
        self.metadatas = list(metadatas)

    def count(self) -> int:
        return len(self.metadatas)

    def get(self, *, limit: int, offset: int, include: list[str]) -> dict[str, Any]:
        page = self.metadatas[offset : offset + limit]
        return {"metadatas": page, "documents": ["text"] * len(page)}


def test_what_is_no_text_is_no_handle() -> None:
    odd = [{HANDLE_KEY: value} for value in (["a", "list"], {"a": 1}, 7, True, None, "")]
    assert live_handles([Collection(*odd, None, {}, {HANDLE_KEY: "a" * 32})]) == {"a" * 32}


def test_a_source_that_is_no_text_does_not_agree() -> None:
    assert live_handles([Collection({HANDLE_KEY: "a" * 32, DIGEST_KEY: ["x"]})]) == set()
