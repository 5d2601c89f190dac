"""Token ids of blocks: the one place where text becomes tokens, at ingestion, query and training.

Every block is tokenised alone, so that its ids do not depend on its neighbours. The tokenizer of
transformers is used by its call signature only; transformers is not imported here.
"""

from __future__ import annotations

import hashlib
import json
import threading
from typing import Any, NamedTuple

from blockattn_rag.blocks import Block, BlockPrompt


class PromptIds(NamedTuple):
    """Token ids of a prompt, block by block. Blocks of zero tokens are left out."""

    context: list[list[int]]
    final: list[int]

    @property
    def flat(self) -> list[int]:
        """All ids in order: what full mode and the oracle see."""
        return [token for ids in (*self.context, self.final) for token in ids]


class BlockTokenizer:
    """Tokenises blocks with a transformers tokenizer.

    Rules: no special tokens are added but the model's own prefix (BOS), once, at the first token of
    the prompt; control tokens are parsed in prompt-template text and never in passage text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        # A fast tokenizer keeps "parse special tokens" as state of the object, not of the call.
        self._lock = threading.Lock()
        self.prefix_ids: list[int] = self._find_prefix_ids()
        self._control_strings = tuple(
            sorted({str(token) for token in tokenizer.get_added_vocab()} - {""})
        )

    def _find_prefix_ids(self) -> list[int]:
        """What the tokenizer itself puts before a text: usually nothing or BOS."""
        plain = self._encode("a", control=True)
        with self._lock:
            full = list(self.tokenizer("a", add_special_tokens=True)["input_ids"])
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return full[:start]
        return []

    def _encode(self, text: str, *, control: bool) -> list[int]:
        # A lone surrogate cannot be tokenised; it becomes a question mark instead of a failure.
        text = text.encode("utf-8", "replace").decode("utf-8")
        with self._lock:
            encoded = self.tokenizer(
                text, add_special_tokens=False, split_special_tokens=not control, verbose=False
            )
        return list(encoded["input_ids"])

    def _with_prefix(self, ids: list[int]) -> list[int]:
        count = len(self.prefix_ids)
        # Chat templates usually write BOS themselves; it must not come twice.
        return ids if count and ids[:count] == self.prefix_ids else [*self.prefix_ids, *ids]

    def block_ids(self, block: Block, *, first: bool) -> list[int]:
        """Token ids of one context block; ``first``: it opens the prompt and carries BOS."""
        template = block.template
        if block.control:
            ids = self._encode(block.rendered, control=True)
        elif any(
            s in part for s in self._control_strings for part in (template.before, template.after)
        ):
            parts = ((template.before, True), (block.text, False), (template.after, True))
            ids = [
                i for part, control in parts if part for i in self._encode(part, control=control)
            ]
        else:
            ids = self._encode(block.rendered, control=False)
        return self._with_prefix(ids) if first else ids

    def final_ids(self, text: str, *, first: bool) -> list[int]:
        """Token ids of the final block; ``first``: there is no context before it."""
        ids = self._encode(text, control=True) if text else []
        return self._with_prefix(ids) if first else ids

    def prompt_ids(self, prompt: BlockPrompt) -> PromptIds:
        """Token ids of a whole prompt, without any store."""
        context = [self.block_ids(b, first=i == 0) for i, b in enumerate(prompt.context)]
        final = self.final_ids(prompt.final, first=not prompt.context)
        return finish_prompt_ids([ids for ids in context if ids], final)

    @property
    def fingerprint(self) -> str:
        """sha256 of all that decides token ids."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            state = json.loads(backend.to_str())
            # Set by callers for batching, without effect on the ids of one text.
            state.pop("truncation", None)
            state.pop("padding", None)
        else:
            state = {"vocab": self.tokenizer.get_vocab(), "class": type(self.tokenizer).__name__}
        text = json.dumps([state, self.prefix_ids], sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()


def finish_prompt_ids(context: list[list[int]], final: list[int]) -> PromptIds:
    """Move the last block into the final one if that is empty: something must be predicted from."""
    if not final:
        if not context:
            raise ValueError("the prompt holds no token")
        return PromptIds(context[:-1], context[-1])
    return PromptIds(context, final)
