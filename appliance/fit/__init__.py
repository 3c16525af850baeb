"""Plans a model's needs on this machine, or on a GPU from a table, before loading it."""
