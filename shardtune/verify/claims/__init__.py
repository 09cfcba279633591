"""Claims about training, each checked on a user's own recipe by shortened runs of the real command."""
