"""What is a run, from recipe to `final/`."""
