"""Evaluation of a model: losses, answers, episodes."""
