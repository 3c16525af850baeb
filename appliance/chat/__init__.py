"""A chat in the terminal with the model of a running server, or with one of this process."""
