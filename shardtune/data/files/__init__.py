"""Readers of files of rows, one for each format; `row_files` chooses among them."""
