"""Models that act."""
