"""Adds adapters to the outputs of linears: two thin matmuls, of each row by its own adapter."""
