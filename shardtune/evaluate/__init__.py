"""What the model can do: losses, answers, episodes."""
