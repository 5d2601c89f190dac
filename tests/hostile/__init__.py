"""Hostile contents through both frameworks: who may write control tokens, and what is a block."""
