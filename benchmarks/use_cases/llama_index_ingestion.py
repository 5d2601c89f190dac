"""Use cases of LlamaIndex for ingestion, indexing and evaluation."""

from __future__ import annotations

from typing import Any

from kits import LlamaIndexKit, passages
from llama_index.core import (
    Document,
    DocumentSummaryIndex,
    PropertyGraphIndex,
    StorageContext,
    SummaryIndex,
    VectorStoreIndex,
    get_response_synthesizer,
)
from llama_index.core.evaluation import FaithfulnessEvaluator, RelevancyEvaluator
from llama_index.core.extractors import (
    KeywordExtractor,
    QuestionsAnsweredExtractor,
    SummaryExtractor,
    TitleExtractor,
)
from llama_index.core.indices.property_graph import ImplicitPathExtractor, SimpleLLMPathExtractor
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import (
    HierarchicalNodeParser,
    SentenceSplitter,
    SentenceWindowNodeParser,
    get_leaf_nodes,
)
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import AutoMergingRetriever
from llama_index.core.schema import TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from registry import QUESTION, llama_index


def _documents(count: int) -> list[Document]:
    return [Document(text=text, doc_id=str(at)) for at, text in enumerate(passages()[:count])]


def _transformed(nodes: Any, transforms: list[Any]) -> Any:
    for transform in transforms:
        nodes = transform(nodes)
    return list(nodes)


@llama_index("IngestionPipeline with a docstore, run twice")
def _(kit: LlamaIndexKit) -> Any:
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(), *kit.transforms()], docstore=SimpleDocumentStore()
    )
    nodes = pipeline.run(documents=_documents(5))
    again = pipeline.run(documents=_documents(5))
    index = VectorStoreIndex(nodes)
    engine = index.as_query_engine(llm=kit.llm, node_postprocessors=kit.postprocessors)
    return not again and str(engine.query(QUESTION))


@llama_index("extractors of titles, summaries, questions, keywords")
def _(kit: LlamaIndexKit) -> Any:
    options: Any = {"llm": kit.llm, "num_workers": 1, "show_progress": False}
    extractors = [
        TitleExtractor(nodes=1, **options),
        SummaryExtractor(summaries=["self"], **options),
        QuestionsAnsweredExtractor(questions=1, **options),
        KeywordExtractor(keywords=2, **options),
    ]
    nodes = _transformed([TextNode(text=text) for text in passages()[:2]], extractors)
    keys = {"document_title", "section_summary", "questions_this_excerpt_can_answer"}
    return keys <= set(nodes[0].metadata)


@llama_index("sentence windows")
def _(kit: LlamaIndexKit) -> Any:
    nodes = SentenceWindowNodeParser(window_size=1)(_documents(10))
    nodes = _transformed(nodes, kit.transforms(metadata_key="window"))
    replacement = MetadataReplacementPostProcessor(target_metadata_key="window")
    engine = VectorStoreIndex(nodes).as_query_engine(
        llm=kit.llm, node_postprocessors=[replacement, *kit.postprocessors]
    )
    return str(engine.query(QUESTION))


@llama_index("AutoMergingRetriever")
def _(kit: LlamaIndexKit) -> Any:
    parser = HierarchicalNodeParser.from_defaults(chunk_sizes=[128, 32], chunk_overlap=0)
    nodes = _transformed(parser(_documents(10)), kit.transforms())
    storage = StorageContext.from_defaults()
    storage.docstore.add_documents(nodes)
    index = VectorStoreIndex(get_leaf_nodes(nodes), storage_context=storage)
    retriever = AutoMergingRetriever(index.as_retriever(similarity_top_k=4), storage)
    engine = RetrieverQueryEngine.from_args(
        retriever, llm=kit.llm, node_postprocessors=kit.postprocessors
    )
    return str(engine.query(QUESTION))


@llama_index("SummaryIndex")
def _(kit: LlamaIndexKit) -> Any:
    nodes = _transformed([TextNode(text=text) for text in passages()[:5]], kit.transforms())
    engine = SummaryIndex(nodes).as_query_engine(
        llm=kit.llm, response_mode="tree_summarize", node_postprocessors=kit.postprocessors
    )
    return str(engine.query(QUESTION))


@llama_index("DocumentSummaryIndex")
def _(kit: LlamaIndexKit) -> Any:
    index = DocumentSummaryIndex.from_documents(
        _documents(2),
        llm=kit.llm,
        transformations=[SentenceSplitter(), *kit.transforms()],
        response_synthesizer=get_response_synthesizer(llm=kit.llm, response_mode="compact"),
    )
    engine = index.as_query_engine(
        retriever_mode="embedding", llm=kit.llm, node_postprocessors=kit.postprocessors
    )
    return str(engine.query(QUESTION))


@llama_index("PropertyGraphIndex")
def _(kit: LlamaIndexKit) -> Any:
    extractors = [SimpleLLMPathExtractor(llm=kit.llm, num_workers=1), ImplicitPathExtractor()]
    index = PropertyGraphIndex(
        _transformed([TextNode(text=text) for text in passages()[:3]], kit.transforms()),
        llm=kit.llm,
        kg_extractors=extractors,
        use_async=False,
    )
    engine = index.as_query_engine(llm=kit.llm, node_postprocessors=kit.postprocessors)
    return str(engine.query(QUESTION))


@llama_index("FaithfulnessEvaluator")
def _(kit: LlamaIndexKit) -> Any:
    found = FaithfulnessEvaluator(llm=kit.llm).evaluate_response(response=kit.query())
    return found.feedback and found.score is not None


@llama_index("RelevancyEvaluator")
def _(kit: LlamaIndexKit) -> Any:
    found = RelevancyEvaluator(llm=kit.llm).evaluate_response(QUESTION, kit.query())
    return found.feedback and found.score is not None
