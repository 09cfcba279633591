"""Resolves the data paths of a recipe: files, globs, directories, data sets of the Hub, rows in memory."""

from shardtune.data.sources.resolve import resolve_sources

__all__ = ["resolve_sources"]
