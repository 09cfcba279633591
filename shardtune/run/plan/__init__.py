"""What a recipe needs, from shapes alone: parameters, memory of a rank, tokens, steps and time, and what would fit."""
