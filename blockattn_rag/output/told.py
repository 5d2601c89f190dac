"""Tools told in words, for chat templates that know none: where a call is required, a grammar makes
it whatever the model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockattn_rag.output.history import without_tools
from blockattn_rag.output.templates import ToolTemplate
from blockattn_rag.prompts.blocks import Span, merged
from blockattn_rag.prompts.chat_template import Message, Spans, chat_spans, origin_of
from blockattn_rag.prompts.marked_text import content_spans

_TOLD = (
    "Answer with a call of one of these functions, written as\n{opening}\n"
    '{{"name": ..., "{arguments}": ...}}\n{closing}\nThe functions:\n{functions}'
)


@dataclass(frozen=True, slots=True)
class ToldTools(ToolTemplate):
    """A chat template that knows no tools. The definitions stand behind the last message of the
    user, as what a schema says does, so that passages before it stay blocks."""

    def spans(
        self,
        tokenizer: Any,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        **template_kwargs: Any,
    ) -> Spans:
        functions = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
        told = _TOLD.format(
            opening=self.form.opening,
            arguments=self.form.argument_keys[0],
            closing=self.form.closing,
            functions="\n".join(functions),
        )
        turns = without_tools(messages)
        if not turns or turns[-1]["role"] != "user":
            turns.append({"role": "user", "content": ""})
        content = turns[-1]["content"]
        if not isinstance(content, tuple):
            content = content_spans(str(content or ""), origin_of("user"))
        between = [Span("\n\n", "system")] if (content := merged(content)) else []
        turns[-1] = {**turns[-1], "content": (*content, *between, Span(told, "system"))}
        return chat_spans(tokenizer, turns, **template_kwargs)
