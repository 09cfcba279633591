"""A worker's own loader, driven exactly and resumed."""
