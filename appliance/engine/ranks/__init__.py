"""Ranks: processes that each hold a part of the model and run the same steps."""
