"""The optimizer step, the training loop, tasks, and building a model on its ranks."""
