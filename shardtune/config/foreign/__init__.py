"""Configurations of other trainers: a table of keys for each, and how they become a recipe (`shardtune convert`)."""
