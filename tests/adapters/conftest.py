"""Servers of the store tests, for adapters whose stores lie there."""

from tests.store.conftest import redis_url, s3, s3_url

__all__ = ["redis_url", "s3", "s3_url"]
