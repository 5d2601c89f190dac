"""Conversion of OpenAI clients' prompts to token ids.

The server renders chats with the model's chat template and splits prompts into blocks as an
in-process engine does, so that both share stored blocks.

Importing this module does not load vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

from blockattn_rag.errors import ProtocolError
from blockattn_rag.output.tool_templates import tool_template
from blockattn_rag.output.tool_use import prompt_spans
from blockattn_rag.prompts.blocks import Block, BlockPrompt, Keep, keep_of
from blockattn_rag.prompts.chat_template import (
    Spans,
    chat_spans,
    has_chat_template,
    template_variables,
)
from blockattn_rag.prompts.formats import CHAT
from blockattn_rag.prompts.tokenization import BlockTokenizer
from blockattn_rag.server.protocol import MOST_BLOCKS
from blockattn_rag.server.vllm.bodies import ChatBody, CompletionBody

Recognizer = Callable[[Spans], Spans]
"""Function that splits known passages out of a text."""


class TokenPrompt(NamedTuple):
    """Token ids of a prompt, and its split as in ``BlockPlan``. In full mode, it is not split."""

    token_ids: list[int]
    lengths: tuple[int, ...] = ()
    keep: tuple[Keep, ...] = ()
    fixed: tuple[int, ...] = ()


class Prompts:
    """Renderer of chats and completions with passages to token ids. Thread-safe."""

    def __init__(self, tokenizer: Any, promote: int = 0) -> None:
        self.tokenizer = tokenizer
        self._promote = promote
        self._tokenizer = BlockTokenizer(tokenizer)
        self._variables = template_variables(tokenizer)

    @property
    def fingerprint(self) -> str:
        return self._tokenizer.fingerprint

    @property
    def has_chat_template(self) -> bool:
        return has_chat_template(self.tokenizer)

    def passage_ids(self, texts: Sequence[str]) -> list[list[int]]:
        blocks = (Block(text.strip(), CHAT.template) for text in texts)
        return [self._tokenizer.block_ids(block, first=False) for block in blocks]

    def token_ids(self, prompt: BlockPrompt, mode: Literal["block", "full"]) -> TokenPrompt:
        """Convert a prompt to token ids. Raises ProtocolError if it has too many blocks."""
        context, final = self._tokenizer.with_final_ids(prompt, self._promote)
        ids_of = self._tokenizer.block_ids
        blocks = [(block, ids_of(block, first=place == 0)) for place, block in enumerate(context)]
        blocks = [(block, ids) for block, ids in blocks if ids]
        token_ids = [*chain.from_iterable(ids for _, ids in blocks), *final]
        if len(blocks) > MOST_BLOCKS:
            raise ProtocolError(
                f"The prompt has {len(blocks)} blocks, expected at most {MOST_BLOCKS}; send fewer "
                "passages"
            )
        if mode == "full":
            return TokenPrompt(token_ids)
        lengths = tuple(len(ids) for _, ids in blocks)
        keep = tuple(keep_of(block.origin) for block, _ in blocks)
        fixed = [place for place, (block, _) in enumerate(blocks) if place and not block.is_passage]
        return TokenPrompt(token_ids, lengths, keep, tuple(fixed))

    def chat(
        self,
        body: ChatBody,
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        recognize: Recognizer | None = None,
    ) -> BlockPrompt:
        """Render a chat with the model's chat template, as blocks."""
        if body.not_text:
            raise ProtocolError(
                f"{body.not_text}, but prompts with passages support only text; remove this part "
                "or the passages"
            )
        if not self.has_chat_template:
            raise ProtocolError("The model has no chat template; use completions")
        read = self._variables | {"add_generation_prompt", "continue_final_message"}
        variables = {name: value for name, value in variables.items() if name in read}
        try:
            if not tools:
                spans = prompt_spans(self.tokenizer, body.messages, None, **variables)
            elif (template := tool_template(self.tokenizer)) is not None:
                spans = template.spans(self.tokenizer, body.messages, tools, **variables)
            else:
                spans = chat_spans(self.tokenizer, body.messages, tools=tools, **variables)
        except Exception as error:  # Templates may raise any exception for unexpected messages.
            raise ProtocolError(f"The chat cannot be rendered: {error}") from error
        return BlockPrompt.from_spans(recognize(spans) if recognize else spans, CHAT.template)

    @staticmethod
    def completion(body: CompletionBody, recognize: Recognizer | None = None) -> BlockPrompt:
        spans = body.spans
        return BlockPrompt.from_spans(recognize(spans) if recognize else spans, CHAT.template)
