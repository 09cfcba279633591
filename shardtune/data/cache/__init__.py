"""Encoded rows on disk."""
