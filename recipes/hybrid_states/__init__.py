"""Comparison of start states for block mode on a tiny hybrid model; see README.md."""
