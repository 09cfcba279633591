"""Runs a user-defined module on all ranks and calls its methods as on a single object."""
