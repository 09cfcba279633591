"""One optimizer step, the loop around it, what a task is and how a model comes to be on its ranks."""
