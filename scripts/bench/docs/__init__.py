"""Tables and pictures of the documentation."""
