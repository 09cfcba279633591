"""Encoded rows on disk."""

from shardtune.data.cache.cache import build_dataset

__all__ = ["build_dataset"]
