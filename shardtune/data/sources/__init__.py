"""What the paths of a recipe mean: files, globs, directories, data sets of the Hub, rows in memory."""

from shardtune.data.sources.resolve import resolve_sources

__all__ = ["resolve_sources"]
