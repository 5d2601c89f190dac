"""Constrained output: answer grammars, and tool calls in each model family's format.

A grammar only allows tokens that can still lead to a valid answer. The options are described in
docs/guides/structured_output.md.
"""

from blockattn_rag.output.tool_formats import FORMATS, InvalidToolCall, ToolCall, ToolFormat
from blockattn_rag.output.tool_parser import CallParser, ReadAnswer, parse_answer
from blockattn_rag.output.tool_templates import ToolTemplate, tool_template

__all__ = [
    "FORMATS",
    "CallParser",
    "InvalidToolCall",
    "ReadAnswer",
    "ToolCall",
    "ToolFormat",
    "ToolTemplate",
    "parse_answer",
    "tool_template",
]
