"""How ranks start, stop and restart."""
