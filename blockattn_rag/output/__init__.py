"""Constrained output: answer grammars, and tool calls in each model family's format.

A grammar only allows tokens that can still lead to a valid answer. All engines, local and remote,
accept it in one of two options::

    engine.generate(prompt, response_format={"type": "json_schema", "json_schema": {
        "name": "Tower", "schema": {"type": "object", "properties": ...}}})
    engine.generate(prompt, response_format=Tower)                 # a pydantic class
    engine.generate(prompt, response_format={"type": "json_object"})

    engine.generate(prompt, structured_outputs={"json": schema})   # as in vLLM
    engine.generate(prompt, structured_outputs={"choice": ["yes", "no"]})
    engine.generate(prompt, structured_outputs={"regex": "[0-9]{4}"})
    engine.generate(prompt, structured_outputs={"grammar": LARK})
    engine.generate(prompt, structured_outputs={"structural_tag": {
        "triggers": ["<call="],
        "structures": [{"begin": "<call=find>", "schema": schema, "end": "</call>"}]}})

``LARK`` is a grammar in llguidance's dialect of Lark. It may contain JSON schemas and the model's
control tokens, so it can force a tool call::

    start: <tool_call> "\\n" call "\\n" </tool_call>
    call: %json {"type": "object", "properties": {"name": {"const": "find"}, "arguments": ...}}

A structural tag only constrains the answer after one of its triggers. ``Generation.json()`` parses
a complete answer, and raises an error if the answer was truncated.
"""

from blockattn_rag.output.tool_calls import InvalidToolCall, ToolCall
from blockattn_rag.output.tool_formats import FORMATS, ToolFormat
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
