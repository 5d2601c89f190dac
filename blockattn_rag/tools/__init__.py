"""Calls of tools in the forms of model families: prompts with tools, and answers read for calls.

Text alone: no model, no framework.
"""

from blockattn_rag.tools.calls import InvalidToolCall, ToolCall
from blockattn_rag.tools.formats import FORMATS, ToolFormat
from blockattn_rag.tools.marks import mark_ids
from blockattn_rag.tools.parser import ReadAnswer, ToolCallParser, parse_answer
from blockattn_rag.tools.templates import ToolTemplate, tool_template

__all__ = [
    "FORMATS",
    "InvalidToolCall",
    "ReadAnswer",
    "ToolCall",
    "ToolCallParser",
    "ToolFormat",
    "ToolTemplate",
    "mark_ids",
    "parse_answer",
    "tool_template",
]
