"""Decides the rows of each step. See scheduler, and policy for the rules."""
