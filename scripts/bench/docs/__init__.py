"""Make the tables and pictures of the documentation."""
