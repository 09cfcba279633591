"""Checkpoints: atomic folders, sharded tensors, reading and writing Hugging Face directories."""
