"""Models of no native family: transformers' modules with the engine's attention and linears."""
