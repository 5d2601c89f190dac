"""Tokenizes blocks for ingestion, answers and training.

Each block is tokenized independently, so its token ids do not depend on other blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from blockattn_rag.prompts.blocks import Block, BlockPrompt, Span
from blockattn_rag.prompts.encoders import private_encoder


class PromptIds(NamedTuple):
    """Token ids of a prompt by block, without empty blocks."""

    context: list[list[int]]
    final: list[int]

    @property
    def flat(self) -> list[int]:
        """All token ids in order, as in full mode."""
        return [token for ids in (*self.context, self.final) for token in ids]


class BlockTokenizer:
    """Tokenizes blocks with a private copy of a transformers tokenizer. Thread-safe.

    Only the model's prefix (BOS) is added as a special token, once, at the start of the prompt.
    Control tokens and other added tokens are only parsed in text from a template or from the
    engine's caller. Text between two added tokens is tokenized as one piece, regardless of its
    origin.

    Args:
        tokenizer: Transformers tokenizer. Later changes to it have no effect.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._encoder = private_encoder(tokenizer)
        self.prefix_ids: list[int] = self._encoder.prefix_ids

    def block_ids(self, block: Block, *, first: bool) -> list[int]:
        """Token ids of a context block, with BOS if the block starts the prompt."""
        return self.final_ids(block.rendered_spans, first=first)

    def final_ids(self, text: str | Iterable[Span], *, first: bool) -> list[int]:
        """Token ids of the final block, with BOS if no context precedes it.

        ``text``: Text by origin, or a trusted string, in which control tokens are parsed.
        """
        ids = self._ids([Span(text, "prompt")] if isinstance(text, str) else text)
        # Most chat templates already include BOS. Do not add it twice.
        has_prefix = ids[: len(self.prefix_ids)] == self.prefix_ids
        return ids if has_prefix or not first else [*self.prefix_ids, *ids]

    def text_ids(self, text: str) -> list[int]:
        """Token ids of a text without BOS, and without parsing control tokens."""
        return self._ids([Span(text, "conversation")])

    def spells_control_token(self, text: str) -> bool:
        return any(token in text for token in self._encoder.control_tokens)

    def with_final_ids(
        self, prompt: BlockPrompt, promote: int = 0
    ) -> tuple[list[Block], list[int]]:
        """Context blocks of a prompt, and token ids of its final block.

        The model needs at least one token in the final block to predict from. If there is none, the
        last context block with tokens becomes the final block.

        Args:
            promote: Number of passages at the end of the prompt to compute with the question. The
                final block then begins with the first of these passages.

        Raises:
            ValueError: The prompt has no tokens.
        """
        passages = [place for place, block in enumerate(prompt.context) if block.is_passage]
        cut = passages[-promote:][0] if promote and passages else len(prompt.context)
        context, final = [*prompt.context[:cut]], list[int]()
        for place, block in enumerate(prompt.context[cut:], cut):
            final += self.block_ids(block, first=place == 0)
        final += self.final_ids(prompt.final_spans, first=not prompt.context)
        while context and not final:
            final = self.block_ids(context.pop(), first=not context)
        if not final:
            raise ValueError("The prompt has no tokens: add a question")
        return context, final

    def prompt_ids(self, prompt: BlockPrompt, promote: int = 0) -> PromptIds:
        """Token ids of a complete prompt. ``promote``: See ``with_final_ids``."""
        context, final = self.with_final_ids(prompt, promote)
        ids = [self.block_ids(block, first=index == 0) for index, block in enumerate(context)]
        return PromptIds([block for block in ids if block], final)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines token ids."""
        return hashlib.sha256(f"{self._encoder.digest}:{self.prefix_ids}".encode()).hexdigest()

    def _ids(self, spans: Iterable[Span]) -> list[int]:
        ids: list[int] = []
        # Text since the last added token, and whether that token strips blanks after it.
        run, swallows = "", False
        for span in spans:
            # Lone surrogates cannot be tokenized, and become question marks.
            text, at = span.text.encode("utf-8", "replace").decode("utf-8"), 0
            for token in self._encoder.added_tokens(text) if span.parses_control else ():
                run += text[at : token.start]
                run = run.rstrip() if token.swallows_before else run
                ids += self._encoder.plain_ids(run, opens=not ids) if run else []
                ids.append(token.token_id)
                run, at, swallows = "", token.end, token.swallows_after
            run += text[at:]
            run = run.lstrip() if swallows else run
            swallows = swallows and not run
        return [*ids, *(self._encoder.plain_ids(run, opens=not ids) if run else [])]
