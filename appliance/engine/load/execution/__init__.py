"""Ways to execute a model."""
