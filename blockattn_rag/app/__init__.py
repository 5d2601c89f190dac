"""Command line, and the pipeline behind it."""
