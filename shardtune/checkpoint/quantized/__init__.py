"""Weights that are quantised on disk: which directories have them, and their values, read part by part."""
