"""Rows with images, from a file to pixels."""
