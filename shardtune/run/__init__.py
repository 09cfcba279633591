"""Runs, from recipe to `final/`."""
