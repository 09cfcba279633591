"""How a model comes to be on its ranks."""
