"""Checkpoints: atomic folders, sharded tensors, Hugging Face directories in and out."""
