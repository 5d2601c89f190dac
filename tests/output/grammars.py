"""Grammars compiled for the tiny tokenizer."""

from __future__ import annotations

from typing import Any

from blockattn_rag.output.compiler import GrammarCompiler, Matcher
from blockattn_rag.output.grammar import Grammar, parse_grammar
from tests.models import tiny_tokenizer

TOKENIZER: Any = tiny_tokenizer()
END = TOKENIZER.eos_token_id


def grammar(**outputs: Any) -> Grammar:
    parsed = parse_grammar(None, outputs)
    assert parsed is not None
    return parsed


def compiler(tokenizer: Any = TOKENIZER) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, [END], "tiny")


def matcher(tokenizer: Any = TOKENIZER, **outputs: Any) -> Matcher:
    return compiler(tokenizer).matcher(grammar(**outputs))


def ids(text: str, tokenizer: Any = TOKENIZER) -> list[int]:
    encoded: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return encoded


def accepts(matcher: Matcher, text: str, tokenizer: Any = TOKENIZER) -> bool:
    """Whether a text is a complete answer."""
    return matcher.follow(ids(text, tokenizer)) and matcher.is_complete()


def nested(levels: int) -> dict[str, Any]:
    """Return a schema with this many levels."""
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema
