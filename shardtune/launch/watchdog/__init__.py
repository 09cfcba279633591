"""How a rank without progress is found: its threads' stacks, the processes of its host, and which rank differs."""
