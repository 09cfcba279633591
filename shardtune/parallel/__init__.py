"""The distribution of weights and sequences over ranks."""
