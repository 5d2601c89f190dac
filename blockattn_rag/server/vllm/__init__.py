"""Block-Attention in vLLM: a KV connector, and endpoints that encode missing blocks."""
