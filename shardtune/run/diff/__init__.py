"""`shardtune diff`: how two runs differ, where their numbers part, and which of the differences can explain it."""
