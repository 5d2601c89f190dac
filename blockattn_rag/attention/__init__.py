"""Relay attention, which reads stored blocks in place."""
