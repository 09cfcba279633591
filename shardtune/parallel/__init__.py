"""How weights and sequences lie on ranks."""
