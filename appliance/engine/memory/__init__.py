"""Plans memory before a model is loaded, and explains a plan that does not fit."""
