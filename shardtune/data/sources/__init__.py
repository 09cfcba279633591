"""What the paths of a recipe mean."""
