"""Models that predict actions."""
