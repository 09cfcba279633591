"""Optimizers, schedules and their states."""
