"""Constrained output: answers bounded by a grammar, and tool calls in each model family's form.

With a grammar, every token is one with which the answer can still become what was asked for.

An engine, here or behind a server, takes two options with every call, one at a time::

    engine.generate(prompt, response_format={"type": "json_schema", "json_schema": {
        "name": "Tower", "schema": {"type": "object", "properties": ...}}})
    engine.generate(prompt, response_format=Tower)                 # a pydantic class
    engine.generate(prompt, response_format={"type": "json_object"})

    engine.generate(prompt, structured_outputs={"json": schema})   # in vLLM's words
    engine.generate(prompt, structured_outputs={"choice": ["yes", "no"]})
    engine.generate(prompt, structured_outputs={"regex": "[0-9]{4}"})
    engine.generate(prompt, structured_outputs={"grammar": LARK})
    engine.generate(prompt, structured_outputs={"structural_tag": {
        "triggers": ["<call="],
        "structures": [{"begin": "<call=find>", "schema": schema, "end": "</call>"}]}})

``LARK`` is a grammar in llguidance's form of Lark, which holds JSON schemas and control tokens of
the model too, so that a call of a tool can be forced::

    start: <tool_call> "\\n" call "\\n" </tool_call>
    call: %json {"type": "object", "properties": {"name": {"const": "find"}, "arguments": ...}}

A structural tag leaves the text free until one of its triggers comes. ``Generation.json()`` gives
the object of a whole answer; an answer that was cut raises there.
"""

from blockattn_rag.output.tool_calls import InvalidToolCall, ToolCall
from blockattn_rag.output.tool_formats import FORMATS, ToolFormat, mark_ids
from blockattn_rag.output.tool_parser import ReadAnswer, ToolCallParser, parse_answer
from blockattn_rag.output.tool_templates import ToolTemplate, tool_template

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
