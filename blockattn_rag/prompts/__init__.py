"""Prompts made of blocks: their parts, their formats, and functions that split text into blocks.

Importing this package does not load torch.
"""

from blockattn_rag.prompts.blocks import Block, BlockPrompt, BlockTemplate, Span, handle_of
from blockattn_rag.prompts.checkpoints import CHECKPOINTS, Checkpoint, format_for, known_checkpoint
from blockattn_rag.prompts.formats import (
    BLANK_LINE,
    BLOCK_ATTENTION,
    CHAT,
    LLAMA3_BLOCK,
    TULU3_BLOCK,
    TURBORAG,
    Frame,
    Passage,
    PromptFormat,
    answer_end,
    follow_up,
    prompt_format,
)
from blockattn_rag.prompts.markers import segment, strip_markers, wrap
from blockattn_rag.prompts.segmentation import conversation

__all__ = [
    "BLANK_LINE",
    "BLOCK_ATTENTION",
    "CHAT",
    "CHECKPOINTS",
    "LLAMA3_BLOCK",
    "TULU3_BLOCK",
    "TURBORAG",
    "Block",
    "BlockPrompt",
    "BlockTemplate",
    "Checkpoint",
    "Frame",
    "Passage",
    "PromptFormat",
    "Span",
    "answer_end",
    "conversation",
    "follow_up",
    "format_for",
    "handle_of",
    "known_checkpoint",
    "prompt_format",
    "segment",
    "strip_markers",
    "wrap",
]
