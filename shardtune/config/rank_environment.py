"""Variables of the environment that a launcher sets for its ranks."""

LISTENING = "SHARDTUNE_LISTENING"
"""The number of a file in rank 0's process: the socket that listens at the port of the rendezvous."""
