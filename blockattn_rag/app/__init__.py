"""Command line, and the RAG pipeline that its commands use."""
