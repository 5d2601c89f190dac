"""Blocks over HTTP: the protocol, its client, and the vLLM plugin."""
