"""What a model is to the rest: adapters, losses, and what a forward needs."""
