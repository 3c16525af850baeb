"""Plans what a model needs on this machine, or on a GPU that is not here, before it is loaded."""
