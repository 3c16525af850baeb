"""The models that a server serves, and the state that its routes share."""
