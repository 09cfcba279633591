"""Simulators that come with shardtune: `reach` (MuJoCo, the `[sim]` extra) and `point2d` (numpy and Pillow alone)."""
