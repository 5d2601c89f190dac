"""Checks of models and servers, and the oracle: a reference implementation of block mode."""
