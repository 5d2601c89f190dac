from __future__ import annotations

import json
from typing import Any

import pytest
from llama_index.core.base.base_selector import SingleSelection
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import (
    RetrieverQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
)
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.question_gen.types import SubQuestionList
from llama_index.core.schema import QueryBundle, TextNode
from llama_index.core.selectors import PydanticSingleSelector
from llama_index.core.tools import QueryEngineTool, ToolMetadata

from blockattn_rag.llama_index import (
    BlockAttentionLLM,
    BlockKVPostprocessor,
    block_response_synthesizer,
)
from tests.engines import tuned_model
from tests.llama_index.conftest import Fixed, scripted
from tests.saying import thinking_model
from tests.scripted import ScriptedEngine, call_of

CHOICES = [ToolMetadata("of towers", "towers"), ToolMetadata("of lakes", "lakes")]
SELECTED = {"index": 2, "reason": "It is wet."}
SUB_QUESTIONS = {
    "items": [
        {"sub_question": "How tall?", "tool_name": "towers"},
        {"sub_question": "How deep?", "tool_name": "lakes"},
    ]
}


def choosing(prompt: str) -> str:
    """Script of a model that calls the selection tool if there is one, and otherwise answers."""
    if '"name": "SingleSelection"' in prompt:
        return call_of("SingleSelection", SELECTED)
    return "Deep." if "lake" in prompt else "Tall."


def tools_of(llm: BlockAttentionLLM) -> list[QueryEngineTool]:
    return [
        QueryEngineTool.from_defaults(
            RetrieverQueryEngine(
                Fixed([TextNode(text=f"A passage {one.description}.")]),
                block_response_synthesizer(llm),
                [BlockKVPostprocessor()],
            ),
            name=one.name,
            description=one.description,
        )
        for one in CHOICES
    ]


@pytest.mark.parametrize("has_tools", [True, False])
async def test_a_selector_chooses_by_tool_call_or_grammar(has_tools: bool) -> None:
    model = None if has_tools else tuned_model(max_position_embeddings=8192)
    engine = ScriptedEngine(lambda _: call_of("SingleSelection", SELECTED), model=model)
    # LlamaIndex declares its class OpenAI here.
    llm: Any = BlockAttentionLLM(engine=engine, is_function_calling_model=True, max_new_tokens=300)
    query = QueryBundle("How deep?")
    selector = PydanticSingleSelector.from_defaults(llm=llm)
    for found in (selector.select(CHOICES, query), await selector.aselect(CHOICES, query)):
        assert (found.ind, found.reason) == (1, "It is wet.")
    assert '"name": "SingleSelection", "description": ' in engine.prompts[0]
    if not has_tools:
        with pytest.raises(ValueError, match="does not support tools"):  # without a required call
            llm.chat_with_tools(tools_of(llm), "How deep?")


def test_a_router_queries_the_selected_engine() -> None:
    llm: Any = scripted(choosing)
    selector = PydanticSingleSelector.from_defaults(llm=llm)
    router = RouterQueryEngine(selector, tools_of(llm), llm=llm)
    assert [str(router.query("How deep?")) for _ in range(2)] == ["Deep.", "Deep."]
    assert llm.engine.store.stats().entries > 0  # the passage of the selected engine


def test_questions_are_split_and_answered_one_by_one() -> None:
    def script(prompt: str) -> str:
        return json.dumps(SUB_QUESTIONS) if "sub-questions" in prompt else choosing(prompt)

    llm = scripted(script)
    splitting = BlockAttentionLLM(
        engine=llm.engine, max_new_tokens=300, generate_kwargs={"response_format": SubQuestionList}
    )
    engine = SubQuestionQueryEngine.from_defaults(
        tools_of(llm), llm=llm, question_gen=LLMQuestionGenerator.from_defaults(llm=splitting),
        response_synthesizer=block_response_synthesizer(llm), verbose=False, use_async=False,
    )  # fmt: skip
    answer = engine.query("How tall is the tower, and how deep the lake?")
    assert str(answer) == "Deep."
    assert isinstance(llm.engine, ScriptedEngine)
    assert "Response: Tall." in llm.engine.prompts[-1]


@pytest.mark.parametrize("opens", [False, True])
def test_an_object_is_never_mistaken_for_thoughts(opens: bool) -> None:
    engine = ScriptedEngine(lambda _: json.dumps(SELECTED), model=thinking_model(opens=opens))
    llm = BlockAttentionLLM(engine=engine, max_new_tokens=300)
    prompt = PromptTemplate("Which?")
    assert llm.structured_predict(SingleSelection, prompt) == SingleSelection(**SELECTED)  # type: ignore[arg-type]
    *_, last = llm.stream_structured_predict(SingleSelection, prompt)
    assert last == SingleSelection(**SELECTED)  # type: ignore[arg-type]
