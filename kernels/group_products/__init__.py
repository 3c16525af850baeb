"""Products of groups of inputs, each with a scale of its own."""
