"""From a file to a micro-batch."""
