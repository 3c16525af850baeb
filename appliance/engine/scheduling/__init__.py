"""Decides what each step runs. See scheduler, and policy for the rules."""
