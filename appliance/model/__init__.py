"""Models as data, and the torch decoder that executes them."""
