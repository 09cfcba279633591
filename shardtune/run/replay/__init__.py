"""`shardtune replay`: one step of a run again, in one process: its rows, their losses, the norms of its gradient."""
