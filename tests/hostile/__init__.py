"""Hostile contents sent through both frameworks cannot inject control tokens or alter blocks."""
