"""From text to blocks to token ids. No torch here.

The names below are public: prompt formats, and what a prompt is made of.
"""

from blockattn_rag.prompts.blocks import Block, BlockPrompt, BlockTemplate, Span, handle_of
from blockattn_rag.prompts.formats import (
    BLANK_LINE,
    BLOCK_ATTENTION,
    CHAT,
    TURBORAG,
    Passage,
    PromptFormat,
    answer_end,
    follow_up,
    prompt_format,
)
from blockattn_rag.prompts.markers import segment, strip_markers, wrap

__all__ = [
    "BLANK_LINE",
    "BLOCK_ATTENTION",
    "CHAT",
    "TURBORAG",
    "Block",
    "BlockPrompt",
    "BlockTemplate",
    "Passage",
    "PromptFormat",
    "Span",
    "answer_end",
    "follow_up",
    "handle_of",
    "prompt_format",
    "segment",
    "strip_markers",
    "wrap",
]
