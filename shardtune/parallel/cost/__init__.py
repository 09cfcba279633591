"""What a step costs a rank in memory, traffic and time, by formulas: docs/scaling.md derives them.

Sizes are bytes, times seconds. Nothing here imports torch: a plan is made without a model.
"""
