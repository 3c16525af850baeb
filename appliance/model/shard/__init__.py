"""A model divided among ranks: which heads, columns and tokens each has."""
