"""Measure reuse after retrieval steps: windows, parents, rerankers and compressors.

    python benchmarks/retrieval_steps.py

For each pipeline, the script ingests the bundled encyclopedia, fifteen documents of ten articles
each, and asks the bundled model fifteen questions about it. Blocks computed for one question are
discarded before the next, so each hit is a passage stored at ingestion. The script prints a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from langchain_classic.retrievers import (
    ContextualCompressionRetriever,
    MultiVectorRetriever,
    ParentDocumentRetriever,
)
from langchain_classic.retrievers.document_compressors import CrossEncoderReranker
from langchain_classic.retrievers.document_compressors.cross_encoder import BaseCrossEncoder
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.runnables import RunnableLambda
from langchain_core.stores import InMemoryStore
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter
from llama_index.core import Document as LlamaDocument
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.node_parser import (
    HierarchicalNodeParser,
    SentenceSplitter,
    SentenceWindowNodeParser,
    get_leaf_nodes,
)
from llama_index.core.postprocessor import (
    LongContextReorder,
    MetadataReplacementPostProcessor,
    SentenceEmbeddingOptimizer,
)
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.retrievers import AutoMergingRetriever
from llama_index.core.schema import MetadataMode

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.app.demo.corpus import bundled_corpus, bundled_questions
from blockattn_rag.engine.results import ReuseStats
from blockattn_rag.langchain import (
    BlockDocumentPrompt,
    BlockKVTransformer,
    ChatBlockAttention,
    HashingEmbeddings,
    format_blocks,
)
from blockattn_rag.llama_index import (
    BlockAttentionLLM,
    BlockKVPostprocessor,
    BlockKVTransform,
    HashingEmbedding,
)
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.store import MemoryStore

Ask = Callable[[str], BlockPrompt]

TOP_K = 4
ARTICLES = 10


class Row(NamedTuple):
    """A pipeline: its name, and a function that ingests the documents and returns a function from
    question to prompt."""

    name: str
    ingest: Callable[[BlockAttentionEngine], Ask]


def texts() -> list[str]:
    """Return the fifteen documents."""
    articles = [passage.text for passage in bundled_corpus()]
    starts = range(0, len(articles), ARTICLES)
    return ["\n\n".join(articles[at : at + ARTICLES]) for at in starts]


# LlamaIndex


def sentences(**transform: Any) -> Callable[[BlockAttentionEngine], Ask]:
    """Return a pipeline that embeds sentences and replaces each with a window around it."""

    def ingest(engine: BlockAttentionEngine) -> Ask:
        llm = BlockAttentionLLM(engine=engine)
        nodes = SentenceWindowNodeParser(window_size=2)(documents())
        nodes = BlockKVTransform(llm=llm, **transform)(nodes)
        index = VectorStoreIndex(nodes, embed_model=HashingEmbedding())
        shown = MetadataReplacementPostProcessor(target_metadata_key="window")
        return asking(llm, index.as_retriever(similarity_top_k=TOP_K), [shown])

    return ingest


def chunks(*steps: Any) -> Callable[[BlockAttentionEngine], Ask]:
    """Return a pipeline with plain chunks, and postprocessors after the retriever."""

    def ingest(engine: BlockAttentionEngine) -> Ask:
        llm = BlockAttentionLLM(engine=engine)
        nodes = BlockKVTransform(llm=llm)(
            SentenceSplitter(chunk_size=64, chunk_overlap=0)(documents())
        )
        index = VectorStoreIndex(nodes, embed_model=HashingEmbedding())
        return asking(llm, index.as_retriever(similarity_top_k=TOP_K), steps)

    return ingest


def merged(engine: BlockAttentionEngine) -> Ask:
    """Embed leaves, and replace them with their parent if many of its leaves are retrieved."""
    llm = BlockAttentionLLM(engine=engine)
    nodes = HierarchicalNodeParser.from_defaults(chunk_sizes=[256, 64], chunk_overlap=0)(
        documents()
    )
    nodes = BlockKVTransform(llm=llm)(nodes)  # Leaves and parents, because prompts contain both.
    storage = StorageContext.from_defaults()
    storage.docstore.add_documents(nodes)
    index = VectorStoreIndex(
        get_leaf_nodes(nodes), storage_context=storage, embed_model=HashingEmbedding()
    )
    leaves: Any = index.as_retriever(similarity_top_k=3 * TOP_K)
    return asking(llm, AutoMergingRetriever(leaves, storage, simple_ratio_thresh=0.3), [])


def documents() -> list[LlamaDocument]:
    return [LlamaDocument(text=text) for text in texts()]


def asking(llm: BlockAttentionLLM, retriever: Any, steps: Sequence[Any]) -> Ask:
    """Return a function from question to prompt, with a retriever and postprocessors."""

    def ask(question: str) -> BlockPrompt:
        found = retriever.retrieve(question)
        for step in (*steps, BlockKVPostprocessor()):
            found = step.postprocess_nodes(found, query_str=question)
        context = "\n\n".join(one.node.get_content(MetadataMode.LLM) for one in found)
        return llm.filled(DEFAULT_TEXT_QA_PROMPT_SEL, context_str=context, query_str=question)

    return ask


# LangChain


class Sentences(BaseDocumentCompressor):
    """Extractor that keeps the sentences that share a word with the question."""

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Any = None
    ) -> list[Document]:
        words = {word for word in query.lower().split() if len(word) > 3}
        return [
            document.model_copy(update={"page_content": ". ".join(kept)})
            for document in documents
            if (
                kept := [
                    s for s in document.page_content.split(". ") if words & {*s.lower().split()}
                ]
            )
        ]


def compressed(*compressors: Any) -> Callable[[BlockAttentionEngine], Ask]:
    """Return a pipeline with plain chunks, and compressors after the retriever."""

    def ingest(engine: BlockAttentionEngine) -> Ask:
        chat = ChatBlockAttention(engine=engine)
        pieces = splitter(220).create_documents(texts())
        retriever: Any = stored(BlockKVTransformer(llm=chat).transform_documents(pieces))
        for compressor in compressors:
            retriever = ContextualCompressionRetriever(
                base_compressor=compressor, base_retriever=retriever
            )
        return answering(chat, retriever)

    return ingest


def parents(engine: BlockAttentionEngine) -> Ask:
    """Embed small chunks, and replace them with the documents that contain them."""
    chat = ChatBlockAttention(engine=engine)
    whole = splitter(600).create_documents(texts())
    retriever = ParentDocumentRetriever(
        vectorstore=InMemoryVectorStore(HashingEmbeddings()),
        docstore=InMemoryStore(),
        child_splitter=splitter(100),
        search_kwargs={"k": TOP_K},
    )
    retriever.add_documents(BlockKVTransformer(llm=chat).transform_documents(whole))
    return answering(chat, retriever)


def several_vectors(engine: BlockAttentionEngine) -> Ask:
    """Embed first sentences, and replace them with complete documents."""
    chat = ChatBlockAttention(engine=engine)
    whole = BlockKVTransformer(llm=chat).transform_documents(
        splitter(220).create_documents(texts())
    )
    keys = [str(number) for number in range(len(whole))]
    summaries = [
        Document(document.page_content.partition(". ")[0], metadata={"doc_id": key})
        for key, document in zip(keys, whole, strict=True)
    ]
    vectors = InMemoryVectorStore.from_documents(summaries, HashingEmbeddings())
    docstore = InMemoryStore()
    docstore.mset(list(zip(keys, whole, strict=True)))
    return answering(chat, MultiVectorRetriever(vectorstore=vectors, docstore=docstore))


def windows(engine: BlockAttentionEngine) -> Ask:
    """Embed sentences, and replace them with the text in their metadata."""
    chat = ChatBlockAttention(engine=engine)
    shown = BlockDocumentPrompt.from_template("{window}")
    nodes = SentenceWindowNodeParser(window_size=2)(documents())
    pieces = [
        Document(node.get_content(), metadata={"window": node.metadata["window"]}) for node in nodes
    ]
    transformer = BlockKVTransformer(llm=chat, document_prompt=shown)
    return answering(chat, stored(transformer.transform_documents(pieces)), shown)


def splitter(size: int) -> RecursiveCharacterTextSplitter:
    return RecursiveCharacterTextSplitter(chunk_size=size, chunk_overlap=0)


def stored(pieces: list[Document]) -> Any:
    store = InMemoryVectorStore.from_documents(pieces, HashingEmbeddings())
    return store.as_retriever(search_kwargs={"k": TOP_K})


def answering(chat: ChatBlockAttention, retriever: Any, shown: Any = None) -> Ask:
    """Return a function from question to prompt, with a retriever."""
    formatted = retriever | RunnableLambda(lambda found: format_blocks(found, shown))

    def ask(question: str) -> BlockPrompt:
        context = f"Use only this context.\n\nContext:\n{formatted.invoke(question)}"
        turns: Any = chat._convert_input([("system", context), ("human", question)])
        return chat.to_prompt(turns.to_messages())

    return ask


class Overlap(BaseCrossEncoder):
    """Fake cross-encoder that scores a text by the words that it shares with the question."""

    def score(self, text_pairs: list[tuple[str, str]]) -> list[float]:
        pairs = [({*one.lower().split()}, {*other.lower().split()}) for one, other in text_pairs]
        return [float(len(one & other)) for one, other in pairs]


RERANKER = CrossEncoderReranker(model=Overlap(), top_n=2)

ROWS = (
    Row("LlamaIndex: chunks", chunks()),
    Row("… `LongContextReorder`", chunks(LongContextReorder())),
    Row(
        "… `SentenceEmbeddingOptimizer`",
        chunks(SentenceEmbeddingOptimizer(embed_model=HashingEmbedding(), percentile_cutoff=0.5)),
    ),
    Row('sentence windows, `metadata_key="window"`', sentences(metadata_key="window")),
    Row("sentence windows, without it", sentences()),
    Row("`AutoMergingRetriever`", merged),
    Row("LangChain: chunks", compressed()),
    Row("… `CrossEncoderReranker`", compressed(RERANKER)),
    Row("… an extractor", compressed(Sentences())),
    Row("… `CrossEncoderReranker`, then an extractor", compressed(RERANKER, Sentences())),
    Row("windows in metadata, `document_prompt`", windows),
    Row("`ParentDocumentRetriever`", parents),
    Row("`MultiVectorRetriever`", several_vectors),
)


def main() -> None:
    model = BlockModel.from_pretrained("bundled")
    print("| pipeline | tokens stored | passages shown | hits | prompt tokens reused |")
    print("|---|---|---|---|---|")
    for row in ROWS:
        store = MemoryStore(1 << 32)
        ask = row.ingest(BlockAttentionEngine(model, store))
        tokens = sum(kv.num_tokens for key in store.keys() if (kv := store.get(key)))  # noqa: SIM118
        shown, answers = 0, list[ReuseStats]()
        for question in bundled_questions():
            prompt = ask(question.question)
            shown += sum(block.is_passage for block in prompt.context)
            asked = BlockAttentionEngine(model, store, read_only=True)
            answers.append(asked.generate(prompt, max_new_tokens=1).stats)
        hits = sum(stats.hits for stats in answers)
        reused = sum(stats.reused_tokens for stats in answers)
        share = reused / sum(stats.prompt_tokens for stats in answers)
        print(f"| {row.name} | {tokens:,} | {shown} | {hits} | {100 * share:.0f} % |", flush=True)


if __name__ == "__main__":
    main()
