"""Shared code of the LlamaIndex and LangChain adapters."""
