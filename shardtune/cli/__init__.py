"""What does a person type, and how does a command end."""
