"""The dashboard in a pseudo-terminal."""
