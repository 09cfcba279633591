"""What the trained model of a run gives, to be compared with what other programs read of its directories."""
