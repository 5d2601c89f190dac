"""The pipeline behind the command line: LlamaIndex over Chroma, with block attention."""
