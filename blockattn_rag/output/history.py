"""Conversations with calls of tools for chat templates that know none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def without_tools(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages without calls, their results as messages of the user.

    A result goes before the question that it was fetched for, which is also where a passage
    belongs: the question must be in the final block.
    """
    made: list[dict[str, Any]] = []
    for turn in turns:
        if turn["role"] == "tool":
            if not turn["content"]:
                continue  # it would be blank lines alone
            asked = [index for index, earlier in enumerate(made) if earlier["role"] == "user"]
            plain = {"role": "user", "content": turn["content"]}
            made.insert(asked[-1] if asked else len(made), plain)
        elif turn["content"] or not turn.get("tool_calls"):
            made.append({name: value for name, value in turn.items() if name != "tool_calls"})
    return made
