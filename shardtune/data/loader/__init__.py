"""From encoded rows to the micro-batches of a step."""
