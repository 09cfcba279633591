"""Ranks on a Ray cluster: Ray's interface, the actor that holds one rank, and the ranks of a run."""
