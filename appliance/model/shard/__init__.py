"""A model divided among ranks: each rank's heads, columns and tokens."""
