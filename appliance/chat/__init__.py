"""A chat in the terminal with the model of a running server."""
