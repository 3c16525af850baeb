"""Answers that must obey a grammar: compiled beside the engine's steps, followed token by token."""
