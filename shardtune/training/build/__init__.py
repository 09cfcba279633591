"""Building a model on its ranks."""
