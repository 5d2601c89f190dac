"""Token ids of blocks: the one place where text becomes tokens, at ingestion, query and training.

Every block is tokenised alone, so that its ids do not depend on its neighbours. The tokenizer of
transformers is used by its call signature only; transformers is not imported here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from blockattn_rag.prompts.blocks import Block, BlockPrompt, Span
from blockattn_rag.prompts.encoders import private_encoder


class PromptIds(NamedTuple):
    """Token ids of a prompt, block by block. Blocks of zero tokens are left out."""

    context: list[list[int]]
    final: list[int]

    @property
    def flat(self) -> list[int]:
        """All ids in order: what full mode and the oracle see."""
        return [token for ids in (*self.context, self.final) for token in ids]


class BlockTokenizer:
    """Tokenises blocks, by a copy of a transformers tokenizer; safe to use from many threads.

    Rules: no special tokens are added but the model's own prefix (BOS), once, at the first token of
    the prompt. Control tokens, and all other tokens that were added to the vocabulary, are parsed
    in text that a template (or the caller of the engine) wrote and nowhere else; what stands
    between two of them is tokenised in one piece, whoever wrote it.

    Args:
        tokenizer: a transformers tokenizer; later changes to it have no effect on ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._encoder = private_encoder(tokenizer)
        self.prefix_ids: list[int] = self._encoder.prefix_ids

    def block_ids(self, block: Block, *, first: bool) -> list[int]:
        """Token ids of one context block; ``first``: it opens the prompt and carries BOS."""
        return self.final_ids(block.rendered_spans, first=first)

    def final_ids(self, text: str | Iterable[Span], *, first: bool) -> list[int]:
        """Token ids of the final block; ``first``: there is no context before it.

        ``text``: by origin; a string is the caller's own, in which control tokens are parsed.
        """
        ids = self._ids([Span(text, "prompt")] if isinstance(text, str) else text)
        # Chat templates usually write BOS themselves; it must not come twice.
        has_prefix = ids[: len(self.prefix_ids)] == self.prefix_ids
        return ids if has_prefix or not first else [*self.prefix_ids, *ids]

    def text_ids(self, text: str) -> list[int]:
        """Token ids of a text without BOS, no control token parsed: for counting and cutting."""
        return self._ids([Span(text, "conversation")])

    def spells_control_token(self, text: str) -> bool:
        """Whether a text holds what would be a control token if it came from a template."""
        return any(token in text for token in self._encoder.control_tokens)

    def with_final_ids(self, prompt: BlockPrompt) -> tuple[list[Block], list[int]]:
        """The context blocks of a prompt, and the token ids of its final block.

        The model predicts from the final block, and so it has a token: where the final text has
        none, the last block that has one is the final block, and no context block.

        Raises:
            ValueError: the prompt holds no token.
        """
        context = list(prompt.context)
        final = self.final_ids(prompt.final_spans, first=not context)
        while context and not final:
            final = self.block_ids(context.pop(), first=not context)
        if not final:
            raise ValueError("the prompt holds no token")
        return context, final

    def prompt_ids(self, prompt: BlockPrompt) -> PromptIds:
        """Token ids of a whole prompt, without any store."""
        context, final = self.with_final_ids(prompt)
        ids = [self.block_ids(block, first=index == 0) for index, block in enumerate(context)]
        return PromptIds([one for one in ids if one], final)

    @property
    def fingerprint(self) -> str:
        """sha256 of all that decides token ids."""
        return hashlib.sha256(f"{self._encoder.digest}:{self.prefix_ids}".encode()).hexdigest()

    def _ids(self, spans: Iterable[Span]) -> list[int]:
        ids: list[int] = []
        run, swallows = "", False  # text since the last control token, which may take blanks
        for span in spans:
            # A lone surrogate cannot be tokenised; it becomes a question mark.
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
