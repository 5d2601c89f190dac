"""Relay attention: attention that reads stored blocks in place."""
