"""RAG pipeline of the command line, built on LlamaIndex and Chroma."""
