"""The prompts that questions to a database become."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import blockattn_rag.llama_index as adapter
from blockattn_rag.app.rag.database import Database
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.markers import wrap


def prompt_maker(database: Database) -> Callable[[str, Sequence[str]], BlockPrompt]:
    """What makes the prompt of ``ask`` from a question and the canonical texts of its passages."""
    from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL

    llm = adapter.BlockAttentionLLM(engine=database.engine, block_template=database.template)

    def prompt(question: str, passages: Sequence[str]) -> BlockPrompt:
        context = "\n\n".join(map(wrap, passages))
        return llm.filled(DEFAULT_TEXT_QA_PROMPT_SEL, context_str=context, query_str=question)

    return prompt
