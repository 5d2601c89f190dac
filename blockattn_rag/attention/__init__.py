"""Attention to blocks where they lie."""
