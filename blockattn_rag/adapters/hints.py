"""Hints for pipelines that cannot reuse passages. ``ReuseHints`` logs each hint once."""

from __future__ import annotations

import logging

from blockattn_rag.prompts.blocks import Block, BlockPrompt

logger = logging.getLogger("blockattn_rag")

_UNMARKED_PROMPTS = 3
_MOST_HEADS = 1000
_LONG_PROMPT = 200  # Characters. Shorter prompts are assumed to contain no passages.
# Number of consecutive prompts with a new first block ("head") after which a hint is logged. A few
# new heads are normal, because applications may alternate between templates.
_NEW_HEADS = 5


class ReuseHints:
    """Logs hints if prompts cannot reuse passages, which correct answers would not reveal."""

    def __init__(self) -> None:
        self._unmarked = 0
        self._any_marked = False
        self._heads: set[str] = set()
        self._new_heads = 0
        self._told_of_heads = False

    def look_at(self, prompt: BlockPrompt) -> None:
        marked = any(block.is_passage for block in prompt.context)
        self._any_marked |= marked
        if not self._any_marked and len(prompt.text) >= _LONG_PROMPT:
            self._unmarked += 1
            if self._unmarked == _UNMARKED_PROMPTS:
                logger.warning(
                    "None of the first %d long prompts had a marked passage, so no passage can "
                    "be reused. LlamaIndex: put BlockKVPostprocessor() last in "
                    "node_postprocessors, call configure(llm) so that passages are not cut, and "
                    "use BlockCitationQueryEngine for citations. LangChain: format documents with "
                    "format_blocks or BlockDocumentPrompt. Alternatively, set recognize=True to "
                    "recognize passages without markers",
                    _UNMARKED_PROMPTS,
                )
        if marked:
            self._look_at_head(prompt.context[0])

    def _look_at_head(self, head: Block) -> None:
        is_new = head.origin == "conversation" and head.handle not in self._heads
        self._new_heads = self._new_heads + 1 if is_new else 0
        if is_new and len(self._heads) < _MOST_HEADS:
            self._heads.add(head.handle)
        if self._new_heads == _NEW_HEADS and not self._told_of_heads:
            self._told_of_heads = True
            logger.warning(
                "Text that changes with every question comes before the passages: it was "
                "recomputed for each of the last %d prompts with passages, and is never stored. In "
                "your prompt template, put the passages before the question and the history",
                _NEW_HEADS,
            )
