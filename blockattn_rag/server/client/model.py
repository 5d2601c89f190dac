"""What this process knows of a model behind a server: its name, its tokenizer, its limits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from blockattn_rag.engine.tokenised import Tokenised, remembering
from blockattn_rag.errors import ServingError
from blockattn_rag.model.loading import load_tokenizer
from blockattn_rag.prompts.blocks import Block, BlockPrompt
from blockattn_rag.prompts.tokenization import BlockTokenizer
from blockattn_rag.server.client.request import TokenPrompt
from blockattn_rag.server.endpoint import ServerInfo


class RemoteModel:
    """A model behind a server, of which the tokenizer alone is loaded here.

    Args:
        given: the name by which the server knows it; None for the server's first.
        tokenizer: a transformers tokenizer, or its name or path; None: that of the model's name.
        ask_info: asks the server what it is.
    """

    def __init__(
        self, given: str | None, tokenizer: Any, ask_info: Callable[[], ServerInfo]
    ) -> None:
        self.given = given
        self._given_tokenizer = tokenizer
        self._ask_info = ask_info
        self._lock = threading.Lock()
        self._block_tokenizer: BlockTokenizer | None = None

    @property
    def name(self) -> str:
        """By which the server knows it."""
        return self.given or self._ask_info().models[0]

    @property
    def fingerprint(self) -> str:
        """Identity of the model, its tokenizer and the layout of its keys and values."""
        return self._ask_info().fingerprint

    @property
    def max_context_tokens(self) -> int:
        """Tokens of a prompt and its answer that the server takes."""
        return self._ask_info().max_tokens

    @property
    def tokenizer(self) -> BlockTokenizer:
        """The tokenizer; the server is asked if its name is not known here."""
        if self._block_tokenizer is not None:
            return self._block_tokenizer
        is_named = self._given_tokenizer is not None or self.given is not None
        return self._load(self.given if is_named else self.name)

    def name_at(self, info: ServerInfo) -> str:
        """``name``, at a server that tells this of itself."""
        return self.given or info.models[0]

    def check(self, info: ServerInfo) -> None:
        """Refuse a server that does not have this model, or has another tokenizer.

        Raises:
            ServingError: says what was found.
        """
        if self.name_at(info) not in info.models:
            raise ServingError(
                f"the server has no model {self.given!r}; it has {', '.join(info.models)}"
            )
        tokenizer = self._load(self.name_at(info))
        if tokenizer.fingerprint != info.tokenizer:
            raise ServingError(
                f"the tokenizer here ({tokenizer.fingerprint[:12]}) differs from the one that the "
                f"server's profile was made with ({info.tokenizer[:12]}): token ids would mean "
                "other texts. Give that model's tokenizer by tokenizer="
            )

    def tokenise(self, prompt: BlockPrompt) -> TokenPrompt:
        """A prompt as token ids.

        Raises:
            ValueError: it holds no token.
        """
        context, final = self.tokenizer.with_final_ids(prompt)
        tokenised = [self.tokenised(block, index == 0) for index, block in enumerate(context)]
        there = [place for place, one in enumerate(tokenised) if one.ids]
        return TokenPrompt([context[i] for i in there], [tokenised[i] for i in there], final)

    def tokenised(self, block: Block, first: bool) -> Tokenised:
        """A block's token ids; ``first``: it opens a prompt, and has BOS."""
        return self._remembered(block, first)

    @cached_property
    def _remembered(self) -> Callable[[Block, bool], Tokenised]:
        return remembering(self.tokenizer)

    def _load(self, name: str | None) -> BlockTokenizer:
        with self._lock:
            if self._block_tokenizer is None:
                given = name if self._given_tokenizer is None else self._given_tokenizer
                self._block_tokenizer = self._made(given)
            return self._block_tokenizer

    def _made(self, given: Any) -> BlockTokenizer:
        if isinstance(given, BlockTokenizer):
            return given
        if not isinstance(given, (str, Path)):
            return BlockTokenizer(given)
        try:
            return BlockTokenizer(load_tokenizer(given))
        except (OSError, ValueError) as error:
            if self._given_tokenizer is not None:
                raise
            raise ServingError(
                f"{str(given)!r}, as the server calls its model, names no tokenizer here: give its "
                "name or path by tokenizer="
            ) from error
