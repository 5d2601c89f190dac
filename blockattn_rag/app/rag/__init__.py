"""Pipeline behind the command line: LlamaIndex and Chroma with block attention."""
