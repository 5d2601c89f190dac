"""Use cases of LlamaIndex's query engines, chat engines and retrievers."""

from __future__ import annotations

import asyncio
from typing import Any

from kits import LlamaIndexKit
from langchain_models import Height
from llama_index.core.evaluation import RelevancyEvaluator
from llama_index.core.indices.query.query_transform import HyDEQueryTransform
from llama_index.core.indices.query.query_transform.base import StepDecomposeQueryTransform
from llama_index.core.postprocessor import LLMRerank
from llama_index.core.query_engine import (
    MultiStepQueryEngine,
    RetrieverQueryEngine,
    RetryQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import QueryFusionRetriever, VectorIndexAutoRetriever
from llama_index.core.selectors import LLMSingleSelector, PydanticSingleSelector
from llama_index.core.tools import QueryEngineTool
from llama_index.core.vector_stores.types import MetadataInfo, VectorStoreInfo
from registry import QUESTION, SECOND_QUESTION, llama_index

# -- response modes --------------------------------------------------------------------------


def _answered(mode: str) -> Any:
    return lambda kit: str(kit.query(response_mode=mode))


for _mode in (
    "compact",
    "refine",
    "tree_summarize",
    "simple_summarize",
    "accumulate",
    "compact_accumulate",
    "generation",
):
    llama_index(f"query engine: {_mode}")(_answered(_mode))


@llama_index("query engine: context_only")
def _(kit: LlamaIndexKit) -> Any:
    found = str(kit.query(response_synthesizer=kit.synthesizer(kit.llm, "context_only")))
    return found.count("Halden Tower") and "[[" not in found


@llama_index("query engine: refine, structured_answer_filtering", by_format=True)
def _(kit: LlamaIndexKit) -> Any:
    options = {"response_mode": "refine", "structured_answer_filtering": True}
    return str(kit.query(response_synthesizer=kit.synthesizer(kit.caller, **options)))


@llama_index("query engine: streaming")
def _(kit: LlamaIndexKit) -> Any:
    return "".join(kit.query(streaming=True).response_gen)


@llama_index("query engine: aquery, two at a time")
def _(kit: LlamaIndexKit) -> Any:
    async def both() -> list[Any]:
        engine = kit.engine()
        return await asyncio.gather(*map(engine.aquery, (QUESTION, SECOND_QUESTION)))

    return [str(answer) for answer in asyncio.run(both())][1]


@llama_index("query engine: output_cls")
def _(kit: LlamaIndexKit) -> Any:
    return isinstance(kit.query(llm=kit.caller, output_cls=Height).response, Height)


@llama_index("citations")
def _(kit: LlamaIndexKit) -> Any:
    engine = kit.citation.from_args(kit.index, llm=kit.llm, similarity_top_k=3)
    return str(engine.query(QUESTION))


# -- chat engines ----------------------------------------------------------------------------


def _chatted(mode: str) -> Any:
    def chat(kit: LlamaIndexKit) -> Any:
        engine = kit.index.as_chat_engine(
            mode, llm=kit.llm, node_postprocessors=kit.postprocessors, similarity_top_k=3
        )
        return [str(engine.chat(question)) for question in (QUESTION, SECOND_QUESTION)][1]

    return chat


for _mode in ("context", "condense_question", "condense_plus_context"):
    llama_index(f"chat engine: {_mode}")(_chatted(_mode))


@llama_index("chat engine: simple")
def _(kit: LlamaIndexKit) -> Any:
    return str(kit.index.as_chat_engine("simple", llm=kit.llm).chat(QUESTION))


@llama_index("chat engine: context, streamed")
def _(kit: LlamaIndexKit) -> Any:
    options: Any = {"llm": kit.llm, "node_postprocessors": kit.postprocessors}
    engine = kit.index.as_chat_engine("context", **options)
    return "".join(engine.stream_chat(QUESTION).response_gen)


@llama_index("chat engine: context, astream_chat")
def _(kit: LlamaIndexKit) -> Any:
    options: Any = {"llm": kit.llm, "node_postprocessors": kit.postprocessors}
    engine = kit.index.as_chat_engine("context", **options)

    async def pieces() -> list[str]:
        answer = await engine.astream_chat(QUESTION)
        return [piece async for piece in answer.async_response_gen()]

    return "".join(asyncio.run(pieces()))


# -- composed engines ------------------------------------------------------------------------


def _tools(kit: LlamaIndexKit) -> list[QueryEngineTool]:
    return [
        QueryEngineTool.from_defaults(kit.engine(), name=name, description=f"Knows {name}.")
        for name in ("towers", "lakes")
    ]


@llama_index("RouterQueryEngine: PydanticSingleSelector")
def _(kit: LlamaIndexKit) -> Any:
    selector = PydanticSingleSelector.from_defaults(llm=kit.caller)
    return str(RouterQueryEngine(selector, _tools(kit), llm=kit.llm).query(QUESTION))


@llama_index("RouterQueryEngine: LLMSingleSelector", by_format=True)
def _(kit: LlamaIndexKit) -> Any:
    selector = LLMSingleSelector.from_defaults(llm=kit.caller)
    return str(RouterQueryEngine(selector, _tools(kit), llm=kit.llm).query(QUESTION))


@llama_index("SubQuestionQueryEngine", by_format=True)
def _(kit: LlamaIndexKit) -> Any:
    engine = SubQuestionQueryEngine.from_defaults(
        _tools(kit),
        llm=kit.llm,
        question_gen=LLMQuestionGenerator.from_defaults(llm=kit.caller),
        use_async=False,
        verbose=False,
    )
    return str(engine.query(QUESTION))


@llama_index("RetryQueryEngine")
def _(kit: LlamaIndexKit) -> Any:
    evaluator = RelevancyEvaluator(llm=kit.llm)
    return str(RetryQueryEngine(kit.engine(), evaluator, max_retries=1).query(QUESTION))


@llama_index("MultiStepQueryEngine")
def _(kit: LlamaIndexKit) -> Any:
    step = StepDecomposeQueryTransform(llm=kit.llm)
    engine = MultiStepQueryEngine(
        kit.engine(),
        step,
        get_response_synthesizer(llm=kit.llm),
        num_steps=2,
        index_summary="Knows towers.",
    )
    return str(engine.query(QUESTION))


@llama_index("HyDEQueryTransform")
def _(kit: LlamaIndexKit) -> Any:
    transform = HyDEQueryTransform(llm=kit.llm)
    return str(TransformQueryEngine(kit.engine(), transform).query(QUESTION))


# -- retrievers and rerankers ----------------------------------------------------------------


def _engine_over(kit: LlamaIndexKit, retriever: Any) -> Any:
    return RetrieverQueryEngine.from_args(
        retriever, llm=kit.llm, node_postprocessors=kit.postprocessors
    )


@llama_index("QueryFusionRetriever")
def _(kit: LlamaIndexKit) -> Any:
    retriever = QueryFusionRetriever(
        [kit.retriever], llm=kit.llm, num_queries=2, similarity_top_k=3, use_async=False
    )
    return str(_engine_over(kit, retriever).query(QUESTION))


@llama_index("VectorIndexAutoRetriever", by_format=True)
def _(kit: LlamaIndexKit) -> Any:
    kind = MetadataInfo(name="kind", type="str", description="tower or lake")
    info = VectorStoreInfo(content_info="An encyclopedia.", metadata_info=[kind])
    retriever = VectorIndexAutoRetriever(kit.index, info, llm=kit.caller)
    return str(_engine_over(kit, retriever).query(QUESTION))


@llama_index("LLMRerank", by_format=True)
def _(kit: LlamaIndexKit) -> Any:
    rerank = LLMRerank(llm=kit.caller, top_n=2)
    return (
        kit.engine(node_postprocessors=[rerank, *kit.postprocessors]).query(QUESTION).source_nodes
    )
