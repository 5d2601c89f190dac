"""Use LangChain with a model server: python examples/ask_langchain.py http://localhost:8000"""

import sys

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore

from blockattn_rag.langchain import (
    BlockKVTransformer,
    HashingEmbeddings,
    format_blocks,
    served_llm,
)

chat = served_llm(sys.argv[1])
documents = [Document("The height of Halden Tower is 214 metres.")]
documents = BlockKVTransformer(server=sys.argv[1]).transform_documents(documents)
retriever = InMemoryVectorStore.from_documents(documents, HashingEmbeddings()).as_retriever()
prompt = ChatPromptTemplate.from_messages(
    [
        ("system", "Answer the question using only the context below.\n\nContext:\n{context}"),
        ("human", "{question}"),
    ]
)
inputs = {"context": retriever | format_blocks, "question": RunnablePassthrough()}
answer = (inputs | prompt | chat).invoke("What is the height of Halden Tower?")
print(answer.content)
print(answer.usage_metadata)
