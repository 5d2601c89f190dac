"""Code that the LlamaIndex and LangChain adapters share."""
