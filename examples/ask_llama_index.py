"""Use LlamaIndex with a model server: python examples/ask_llama_index.py http://localhost:8000"""

import sys

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter

from blockattn_rag.llama_index import (
    BlockKVPostprocessor,
    BlockKVTransform,
    HashingEmbedding,
    configure,
    served_llm,
)

llm = served_llm(sys.argv[1])
configure(llm)
documents = [Document(text="The height of Halden Tower is 214 metres.")]
pipeline = IngestionPipeline(transformations=[SentenceSplitter(), BlockKVTransform(llm=llm)])
index = VectorStoreIndex(pipeline.run(documents=documents), embed_model=HashingEmbedding())
engine = index.as_query_engine(node_postprocessors=[BlockKVPostprocessor()])
print(engine.query("What is the height of Halden Tower?"))
