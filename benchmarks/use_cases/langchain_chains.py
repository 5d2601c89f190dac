"""Use cases of LangChain's chains and retrievers."""

from __future__ import annotations

import asyncio
from typing import Any

from kits import LangChainKit
from langchain_classic.chains import (
    ConversationalRetrievalChain,
    HypotheticalDocumentEmbedder,
    RetrievalQA,
    create_history_aware_retriever,
    create_retrieval_chain,
)
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.chains.question_answering import load_qa_chain
from langchain_classic.chains.summarize import load_summarize_chain
from langchain_classic.retrievers import (
    ContextualCompressionRetriever,
    EnsembleRetriever,
    MultiQueryRetriever,
    MultiVectorRetriever,
    ParentDocumentRetriever,
)
from langchain_classic.retrievers.document_compressors import (
    CrossEncoderReranker,
    LLMChainExtractor,
    LLMChainFilter,
    LLMListwiseRerank,
)
from langchain_classic.retrievers.document_compressors.cross_encoder import BaseCrossEncoder
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_core.stores import InMemoryStore
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter
from registry import QUESTION, SECOND_QUESTION, langchain

from blockattn_rag.langchain import HashingEmbeddings

# -- calling a chain -------------------------------------------------------------------------


@langchain("chain: invoke")
def _(kit: LangChainKit) -> Any:
    return kit.chain.invoke(QUESTION).content


@langchain("chain: stream")
def _(kit: LangChainKit) -> Any:
    return "".join((kit.chain | StrOutputParser()).stream(QUESTION))


@langchain("chain: batch")
def _(kit: LangChainKit) -> Any:
    return kit.chain.batch([QUESTION, SECOND_QUESTION, QUESTION])[2].content


@langchain("chain: ainvoke")
def _(kit: LangChainKit) -> Any:
    return asyncio.run(kit.chain.ainvoke(QUESTION)).content


@langchain("chain: astream")
def _(kit: LangChainKit) -> Any:
    async def pieces() -> list[str]:
        return [piece.text async for piece in kit.chain.astream(QUESTION)]

    return "".join(asyncio.run(pieces()))


@langchain("chain: abatch")
def _(kit: LangChainKit) -> Any:
    return asyncio.run(kit.chain.abatch([QUESTION, SECOND_QUESTION]))[1].content


@langchain("chain: astream_events")
def _(kit: LangChainKit) -> Any:
    async def kinds() -> set[str]:
        return {event["event"] async for event in kit.chain.astream_events(QUESTION)}

    return "on_chat_model_stream" in asyncio.run(kinds())


@langchain("chain: an answer with its sources")
def _(kit: LangChainKit) -> Any:
    def shown(given: dict[str, Any]) -> dict[str, Any]:
        return {"context": kit.show(given["context"]), "input": given["input"]}

    chain = RunnableParallel(context=kit.retriever, input=RunnablePassthrough()).assign(
        answer=RunnableLambda(shown) | kit.prompt | kit.chat | StrOutputParser()
    )
    found = chain.invoke(QUESTION)
    return found["context"] and found["answer"]


# -- LangChain's ready-made chains -----------------------------------------------------------


def _stuff(kit: LangChainKit) -> Any:
    return create_stuff_documents_chain(kit.chat, kit.prompt, document_prompt=kit.document_prompt)


@langchain("create_stuff_documents_chain")
def _(kit: LangChainKit) -> Any:
    return _stuff(kit).invoke({"context": kit.retriever.invoke(QUESTION), "input": QUESTION})


@langchain("create_retrieval_chain")
def _(kit: LangChainKit) -> Any:
    return create_retrieval_chain(kit.retriever, _stuff(kit)).invoke({"input": QUESTION})["answer"]


@langchain("create_history_aware_retriever")
def _(kit: LangChainKit) -> Any:
    prompt = ChatPromptTemplate.from_messages(
        [
            ("system", "Make the last question one that is understood alone."),
            MessagesPlaceholder("chat_history"),
            ("human", "{input}"),
        ]
    )
    retriever = create_history_aware_retriever(kit.chat, kit.retriever, prompt)
    history = [("human", SECOND_QUESTION), ("ai", "310 hectares.")]
    chain = create_retrieval_chain(retriever, _stuff(kit))
    return chain.invoke({"input": QUESTION, "chat_history": history})["answer"]


@langchain("RetrievalQA")
def _(kit: LangChainKit) -> Any:
    options = {"document_prompt": kit.document_prompt}
    chain = RetrievalQA.from_chain_type(
        kit.chat, retriever=kit.retriever, chain_type_kwargs=options
    )
    return chain.invoke({"query": QUESTION})["result"]


@langchain("ConversationalRetrievalChain")
def _(kit: LangChainKit) -> Any:
    options = {"document_prompt": kit.document_prompt}
    chain = ConversationalRetrievalChain.from_llm(
        kit.chat, kit.retriever, combine_docs_chain_kwargs=options
    )
    history = [(SECOND_QUESTION, "310 hectares.")]
    return chain.invoke({"question": QUESTION, "chat_history": history})["answer"]


@langchain("load_summarize_chain: map_reduce")
def _(kit: LangChainKit) -> Any:
    # The chain has no document prompt, so put the markers into the documents' text.
    found = [Document(kit.show([document])) for document in kit.retriever.invoke(QUESTION)]
    chain = load_summarize_chain(kit.chat, "map_reduce")
    return chain.invoke({"input_documents": found})["output_text"]


@langchain("load_summarize_chain: refine")
def _(kit: LangChainKit) -> Any:
    chain = load_summarize_chain(kit.chat, "refine", document_prompt=kit.document_prompt)
    found = chain.invoke({"input_documents": kit.retriever.invoke(QUESTION)})
    return found["output_text"]


@langchain("load_qa_chain: map_rerank", by_format=True)
def _(kit: LangChainKit) -> Any:
    given = {"input_documents": kit.retriever.invoke(QUESTION), "question": QUESTION}
    return load_qa_chain(kit.chat, "map_rerank").invoke(given)["output_text"]


# -- retrievers, with a chain over their results ---------------------------------------------


@langchain("MultiQueryRetriever")
def _(kit: LangChainKit) -> Any:
    retriever = MultiQueryRetriever.from_llm(kit.retriever, kit.chat, include_original=True)
    return kit.chain_over(retriever).invoke(QUESTION).content


@langchain("LLMChainExtractor")
def _(kit: LangChainKit) -> Any:
    compressor = LLMChainExtractor.from_llm(kit.chat)
    retriever = ContextualCompressionRetriever(
        base_compressor=compressor, base_retriever=kit.retriever
    )
    return kit.chain_over(retriever).invoke(QUESTION).content


@langchain("LLMChainFilter", by_format=True)
def _(kit: LangChainKit) -> Any:
    compressor = LLMChainFilter.from_llm(kit.chat)
    retriever = ContextualCompressionRetriever(
        base_compressor=compressor, base_retriever=kit.retriever
    )
    return kit.chain_over(retriever).invoke(QUESTION).content


class _SharedWords(BaseCrossEncoder):
    """Fake cross-encoder that scores a pair of texts by their shared words."""

    def score(self, text_pairs: list[tuple[str, str]]) -> list[float]:
        return [float(len(set(one.split()) & set(other.split()))) for one, other in text_pairs]


@langchain("CrossEncoderReranker")
def _(kit: LangChainKit) -> Any:
    compressor = CrossEncoderReranker(model=_SharedWords(), top_n=2)
    retriever = ContextualCompressionRetriever(
        base_compressor=compressor, base_retriever=kit.retriever
    )
    return kit.chain_over(retriever).invoke(QUESTION).content


@langchain("LLMListwiseRerank")
def _(kit: LangChainKit) -> Any:
    compressor = LLMListwiseRerank.from_llm(kit.caller, top_n=2)
    return compressor.compress_documents(kit.retriever.invoke(QUESTION), QUESTION)


@langchain("EnsembleRetriever")
def _(kit: LangChainKit) -> Any:
    other = kit.store.as_retriever(search_type="mmr", search_kwargs={"k": 2})
    retriever = EnsembleRetriever(retrievers=[kit.retriever, other], weights=[0.5, 0.5])
    return kit.chain_over(retriever).invoke(QUESTION).content


@langchain("ParentDocumentRetriever")
def _(kit: LangChainKit) -> Any:
    retriever = ParentDocumentRetriever(
        vectorstore=InMemoryVectorStore(HashingEmbeddings()),
        docstore=InMemoryStore(),
        child_splitter=RecursiveCharacterTextSplitter(chunk_size=60, chunk_overlap=0),
    )
    retriever.add_documents(kit.retriever.invoke(QUESTION))
    return kit.chain_over(retriever).invoke(QUESTION).content


@langchain("MultiVectorRetriever")
def _(kit: LangChainKit) -> Any:
    docstore: InMemoryStore = InMemoryStore()
    vectors = InMemoryVectorStore(HashingEmbeddings())
    found = kit.retriever.invoke(QUESTION)
    docstore.mset([(str(at), document) for at, document in enumerate(found)])
    vectors.add_documents(
        [
            Document(one.page_content[:40], metadata={"doc_id": str(at)})
            for at, one in enumerate(found)
        ]
    )
    retriever = MultiVectorRetriever(vectorstore=vectors, docstore=docstore)
    return kit.chain_over(retriever).invoke(QUESTION).content


@langchain("HypotheticalDocumentEmbedder")
def _(kit: LangChainKit) -> Any:
    embedder = HypotheticalDocumentEmbedder.from_llm(
        kit.chat, HashingEmbeddings(), prompt_key="web_search"
    )
    found = kit.store.similarity_search_by_vector(embedder.embed_query(QUESTION), k=2)
    return kit.chat.invoke(f"{kit.show(found)}\n\n{QUESTION}").content
